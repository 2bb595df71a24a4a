"""Write the page of one version from what is known of it (`known.py`): no figure here that is not there."""

from collections.abc import Sequence
from typing import Any

from kvq_calib.report.captions import size_of
from kvq_calib.report.page import origin, pictures
from kvq_calib.report.page.changes import changes
from kvq_calib.report.page.html import Html, anchor, document, section, tag
from kvq_calib.report.page.summary import summary
from kvq_calib.report.page.words import Known, judged, reference


def page(known: Known) -> str:
    """The whole page."""
    parts = {
        "Summary": summary,
        "Bits by layer": pictures.bits,
        "Error by layer": pictures.errors,
        "Frontier": pictures.frontier,
        "Tasks": pictures.tasks,
        "Greedy text": pictures.greedy,
        "Against the last version": changes,
        "Health": origin.health,
        "Provenance": origin.provenance,
        "History": origin.history,
    }
    links = tag("nav", (tag("a", title, href=f"#{anchor(title)}") for title in parts))
    body = (section(title, part(known)) for title, part in parts.items())
    foot = tag("p", f"Made by kvq {known['kvq']}. Nothing on this page is loaded from elsewhere.", class_="soft")
    return document(reference(known), _head(known), links, body, foot)


def _head(known: Known) -> list[Html]:
    badges = [tag("span", alias, class_="badge good") for alias in known["aliases"]]
    if known["yanked"] is not None:
        badges.append(tag("span", "yanked", class_="badge bad"))
    if any(row["result"] == "failed" for row in known["health"] if row["check"] != "yanked"):
        badges.append(tag("span", "damaged", class_="badge bad"))
    model = known.get("model") or {}
    size = (known["evaluation"] or {}).get("parameters")
    about = [str(model.get("id") or "unknown model"), size and f"{size_of(size)} parameters", known["published"]]
    return [
        tag("h1", reference(known), " ", _spaced(badges)),
        judged(known["verdict"]),
        tag("p", ", ".join(str(one) for one in about if one), class_="soft"),
        tag("p", (known["recipe"] or {}).get("summary")),
        *_use(known),
    ]


def _use(known: Known) -> list[Html]:
    """Return the lines that load the version, to copy."""
    if known["recipe"] is None:
        return []
    place = known["registry"]
    where = f"{place}/" if place.startswith("hf://") else ""
    elsewhere = f', registry="{place}"' if place.startswith("file:") else ""
    load = f'KVQCache.from_pretrained("{where}{reference(known)}", model=model{elsewhere})'
    lines = [
        "from kvq_runtime import KVQCache",
        'model.set_attn_implementation("kvq")',
        f"cache = {load}",
        "output = model.generate(**inputs, past_key_values=cache)",
    ]
    return [tag("pre", "\n".join(lines))]


def _spaced(parts: Sequence[Html]) -> list[Any]:
    return [piece for part in parts for piece in (part, " ")]
