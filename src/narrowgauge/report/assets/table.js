// Sortable tables, and the "As a table" view of a chart, which is built when it is first opened.

const ROWS = 500;

// columns: {key, title, text(value, row), bar: the largest value or null, words: true for prose}
function dataTable(name, columns, rows, caption) {
  const body = el("tbody");
  const heads = columns.map((column) =>
    el(
      "th",
      { scope: "col", class: column.words ? "words" : null },
      el("button", { type: "button", onclick: () => sort(column) }, column.title),
    ),
  );

  function sort(column) {
    const before = choice(`sort-${name}`, null);
    const down = before && before.key === column.key ? !before.down : typeof firstOf(rows, column.key) === "number";
    choose(`sort-${name}`, { key: column.key, down });
    draw();
  }

  function draw() {
    const order = choice(`sort-${name}`, null);
    const sorted = [...rows];
    if (order) {
      const sign = order.down ? -1 : 1;
      const missing = (value) => value === undefined || value === null || value === "";
      sorted.sort((a, b) => {
        const [one, two] = [a[order.key], b[order.key]];
        if (missing(one) || missing(two)) return Number(missing(one)) - Number(missing(two));
        return (
          sign *
          (typeof one === "number" && typeof two === "number"
            ? one - two
            : String(one).localeCompare(String(two), "en", { numeric: true }))
        );
      });
    }
    columns.forEach((column, index) => {
      if (order && order.key === column.key)
        heads[index].setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else heads[index].removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...sorted.slice(0, ROWS).map((row) =>
        el(
          "tr",
          {},
          columns.map((column) => cell(column, row)),
        ),
      ),
    );
  }

  draw();
  const table = el(
    "table",
    {},
    caption ? el("caption", { class: "note" }, caption) : null,
    el("thead", {}, el("tr", {}, heads)),
    body,
  );
  const more =
    rows.length > ROWS ? el("p", { class: "note" }, `the first ${ROWS} of ${count(rows.length)} rows`) : null;
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table), more];
}

function firstOf(rows, key) {
  const row = rows.find((one) => one[key] !== undefined && one[key] !== null && one[key] !== "");
  return row ? row[key] : null;
}

function cell(column, row) {
  const value = row[column.key];
  const text = value === undefined || value === null ? "" : column.text ? column.text(value, row) : String(value);
  if (column.words) return el("td", { class: "words" }, text);
  if (column.bar && typeof value === "number" && value > 0) {
    const share = `${clamp((value / column.bar) * 100, 0, 100)}%`;
    const tint = `color-mix(in srgb, ${column.tint || "var(--under)"} 22%, transparent)`;
    return el("td", { class: "bar", style: { "--share": share, "--tint": tint } }, text);
  }
  return el("td", {}, text);
}

// The data of a chart. make() returns {columns: [titles], rows: [[cells]]} when the reader opens the table.
function asTable(name, make) {
  const box = el("details", { class: "as-table" }, el("summary", {}, "As a table"));
  box.addEventListener("toggle", () => {
    if (!box.open || box.childElementCount > 1) return;
    const { columns, rows } = make();
    const described = columns.map((title, index) => ({ key: String(index), title }));
    box.append(
      ...dataTable(
        name,
        described,
        rows.map((row) => ({ ...row })),
      ).filter(Boolean),
    );
  });
  return box;
}
