// Tables of ten rows and more are sorted by a click, Enter or Space on a column's name; again for the other order.
"use strict";

function sortable(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => row.cells[column].textContent.trim();
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.style.cssText = "all: unset; text-decoration: underline dotted";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("focus", () => (button.style.outline = button.matches(":focus-visible") ? "2px solid currentColor" : ""));
    button.addEventListener("blur", () => (button.style.outline = ""));
    head.style.cursor = "pointer";
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => key(a, column).localeCompare(key(b, column), "en", { numeric: true }));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) if (table.tHead && table.tBodies[0]?.rows.length >= 10) sortable(table);
});
