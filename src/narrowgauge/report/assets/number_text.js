// Formats numbers as text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) {
  return value === null || value === undefined ? "" : whole.format(value);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3)
    return value
      .toExponential(Math.max(digits - 2, 0))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// Large numbers with a unit prefix: 12k, 3.4M, 1.2G.
function large(value, unit = "") {
  if (value === null || value === undefined) return "";
  const steps = [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ];
  for (const [size, letter] of steps) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit ? " " : ""}${letter}${unit}`;
  }
  return `${Number(value.toPrecision(3))}${unit ? " " : ""}${unit}`;
}

// Memory as the command line prints it, in powers of ten.
function bytes(value) {
  if (value === null || value === undefined) return "";
  return value >= 1e8 ? `${(value / 1e9).toFixed(2)} GB` : `${(value / 1e6).toFixed(1)} MB`;
}

// Caches, which are sized in powers of two, as on the command line.
function cacheBytes(value) {
  return value >= 2 ** 20 ? `${whole.format(value / 2 ** 20)} MiB` : `${whole.format(value / 2 ** 10)} KiB`;
}

function percent(share, digits = 2) {
  if (share === null || share === undefined || Number.isNaN(share)) return "";
  if (share === 0) return "0%";
  const value = share * 100;
  if (Math.abs(value) < 0.001) return "< 0.001%";
  return `${Number(value.toPrecision(digits + (Math.abs(value) >= 10 ? 1 : 0)))}%`;
}

function signed(share, digits = 3) {
  if (share === null || share === undefined) return "";
  return `${share > 0 ? "+" : ""}${Number((share * 100).toPrecision(digits))}%`;
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 90) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => `2${String(exponent).replace(/./g, (letter) => SUPERSCRIPT[letter] || letter)}`;
