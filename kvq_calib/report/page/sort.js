"use strict";
// Sort a table by a click on a heading, and show the rows that hold a text and have a mark, which the address may name
// (registry.html#attention). Without this script all rows show.
for (const table of document.querySelectorAll("table.sorted")) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => {
    if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  const sort = (head, column) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = (row) => value(row, column) !== "";
    rows.sort((a, b) => order(value(a, column), value(b, column)) * (down && known(a) && known(b) ? -1 : 1));
    body.append(...rows);
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head, column));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head, column); });
  });
  const tools = document.querySelector(".tools");
  const [text, mark, count] = ["input", "select", "output"].map((name) => tools.querySelector(name));
  const show = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const said = row.textContent.toLowerCase();
      const kept = words.every((word) => said.includes(word)) && (mark.value === "" || row.classList.contains(mark.value));
      row.hidden = !kept;
      shown += kept ? 1 : 0;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  text.addEventListener("input", show);
  mark.addEventListener("change", show);
  const named = () => {
    const asked = location.hash.slice(1);
    if (Array.from(mark.options).some((option) => option.value === asked && asked !== "")) {
      mark.value = asked;
      tools.scrollIntoView();
    }
    show();
  };
  window.addEventListener("hashchange", named);
  tools.hidden = false;
  table.classList.add("live");
  named();
}
