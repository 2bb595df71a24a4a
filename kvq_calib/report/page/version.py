"""Write the page of one version from what is known of it (`known.py`): no figure here that is not there."""

from kvq_calib.report import card, decode_table
from kvq_calib.report.captions import size_of
from kvq_calib.report.page import earlier, html, pictures, rows
from kvq_calib.report.page.words import Known, model_of, reference


def page(known: Known) -> str:
    """The whole page."""
    badges = [*known["aliases"], *(["yanked"] if known["yanked"] is not None else [])]
    if any(row["result"] == "failed" for row in known["health"] if row["check"] != "yanked"):
        badges.append("damaged")
    model = (known.get("model") or {}).get("id") or "unknown model"
    size = (known["evaluation"] or {}).get("parameters")
    about = [str(model), size and f"{size_of(size)} parameters", known["published"]]
    return html.page(
        "version.html", known=known, reference=reference(known), model=model_of(known), badges=badges,
        about=", ".join(filter(None, about)), small=size is not None and size < card.SMALL, rows=rows,
        earlier=earlier, pictures=pictures, decode=decode_table,
    )  # fmt: skip
