// The format explorer: shows how each format stores a number.

function explorer(formats) {
  const rows = el("div", { class: "bits-table", "aria-live": "polite", "data-chart": "explorer" });
  const input = el("input", {
    type: "text",
    id: "explore",
    size: 14,
    value: choice("explore", "1.2e-7"),
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "explore-help",
  });
  const problem = el("p", { class: "note", id: "explore-help" });

  function show() {
    choose("explore", input.value);
    const x = parseNumber(input.value);
    input.setAttribute("aria-invalid", String(x === null));
    problem.textContent =
      x === null
        ? "Not a number: try 1.2e-7, -3, 0x1p-24, inf or nan."
        : "Decimal, hexadecimal (0x1p-24), inf or nan. Casts round to nearest, ties to even, and do not saturate.";
    if (x === null) return;
    rows.replaceChildren(...Object.entries(formats).map(([name, f]) => formatRow(name, f, x)));
  }

  const examples = ["0.1", "1.2e-7", "2049", "65520", "448", "3.4e38", "0x1p-24"].map((text) =>
    el(
      "button",
      {
        type: "button",
        class: "quiet",
        onclick: () => {
          input.value = text;
          show();
        },
      },
      text,
    ),
  );
  input.addEventListener("input", show);
  show();
  return el("div", {}, el("div", { class: "controls" }, field("Number", input), examples), problem, rows);
}

function formatRow(name, f, x) {
  const stored = store(x, f);
  const kind = (i) => (i === 0 ? "sign" : i <= f.exponent_bits ? "exponent" : "mantissa");
  const bits = [...stored.bits].map((bit, i) => el("i", { class: bit === "1" ? `${kind(i)} one` : kind(i) }, bit));
  return el(
    "div",
    { class: "format-row", "data-format": name, "data-state": stored.state },
    el("div", { class: "name" }, f.title),
    el("div", { class: "bits", role: "img", "aria-label": `bits ${stored.bits}`, "data-bits": stored.bits }, bits),
    el(
      "div",
      { class: "outcome" },
      el("span", { class: "stored" }, formatValue(stored.value)),
      el("small", {}, explain(x, stored, f)),
    ),
  );
}

function formatValue(x) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  return Object.is(x, -0) ? "-0" : String(Number(x.toPrecision(9)));
}

// Describes how a number was stored.
function explain(x, stored, f) {
  const lowest = 1 - f.bias - f.mantissa_bits;
  const size = Math.abs(stored.value);
  let subnormal = "";
  if (size > 0 && size < 2 ** (1 - f.bias)) {
    const multiple = timesPower(size, -lowest);
    subnormal = `${multiple} × ${power(lowest)}, ${multiple.toString(2).length} of ${f.mantissa_bits + 1} bits left`;
  }
  const off = stored.error ? `, relative error ${percent(stored.error, 3)}` : "";
  if (stored.state === "exact") return subnormal ? `exact, as a subnormal: ${subnormal}` : "exact";
  if (stored.state === "subnormal") return `subnormal: ${subnormal}${off}`;
  if (stored.state === "underflow") return `underflow: values up to ${power(lowest - 1)} become 0`;
  if (stored.state === "overflow") {
    const why = Number.isFinite(x) ? `the largest number is ${number(f.max, 5)}` : "the format has no inf";
    const saturated = `; narrowgauge's FP8 casts saturate to ${number(Math.sign(x) * f.max, 5)}`;
    return `overflow: ${why}${f.storage_bits === 8 ? saturated : ""}`;
  }
  return `rounded${off}`;
}
