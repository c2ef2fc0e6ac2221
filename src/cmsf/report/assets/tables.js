// Tables that are sorted by a click on a column's head, and filtered by words or by a class.

function startTables() {
  for (const table of all("table.sortable")) {
    table.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("th[aria-sort]");
      if (head) sortBy(table, head.cellIndex, nextDirection(head));
    });
    filterRows(table);
  }
  for (const field of all("[data-filters]")) field.addEventListener("input", () => filterRows(byId(field.dataset.filters)));
  for (const field of all("[data-chooses]")) field.addEventListener("change", () => filterRows(byId(field.dataset.chooses)));
}

// Of numbers the largest are asked for first, of names the first.
function nextDirection(head) {
  const first = head.dataset.kind === "number" ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  return head.ariaSort === first ? other : first;
}

function sortBy(table, column, direction) {
  const head = table.tHead.rows[0].cells[column];
  if (!head?.hasAttribute("aria-sort")) return;
  for (const other of all("th[aria-sort]", table.tHead)) other.ariaSort = other === head ? direction : "none";
  const keyOf = head.dataset.kind === "number" ? numberIn : textIn;
  const sign = direction === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: keyOf(row.cells[column]) }));
  rows.sort((one, other) => compare(one.key, other.key, sign));
  table.tBodies[0].append(...rows.map(({ row }) => row));
}

// What is not known stands last in either direction.
function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  return sign * (typeof one === "number" ? one - other : one.localeCompare(other, undefined, { numeric: true }));
}

function numberIn(cell) {
  const value = Number.parseFloat(cell.dataset.value);
  return Number.isNaN(value) ? null : value;
}

const textIn = (cell) => cell.textContent.trim() || null;

function filterRows(table) {
  const words = (document.querySelector(`[data-filters="${table.id}"]`)?.value ?? "").toLowerCase().trim();
  const chosen = document.querySelector(`[data-chooses="${table.id}"]`)?.value ?? "";
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words) || !isOfClass(row, chosen);
  const shown = rows.filter((row) => !row.hidden).length;
  const count = document.querySelector(`[data-counts="${table.id}"]`);
  count.textContent = shown === rows.length ? `${shown}` : `${shown} of ${rows.length}`;
}

const isOfClass = (row, chosen) => chosen === "" || [...row.cells].some((cell) => cell.dataset.class === chosen);

// Which column each table is sorted by, to be kept over a reload.
function sorts() {
  const sorted = all("table.sortable th[aria-sort]").filter((head) => head.ariaSort !== "none");
  return sorted.map((head) => [head.closest("table").id, head.cellIndex, head.ariaSort]);
}
