// Number formats: stores a number bit-exactly in each format. The same arithmetic as formats.py, in doubles.

const scratch = new DataView(new ArrayBuffer(8));

// floor(log2 |x|) of a finite nonzero number; exact, including subnormal doubles.
function exponentOf(x) {
  scratch.setFloat64(0, x);
  const field = (scratch.getUint16(0) >> 4) & 0x7ff;
  return field ? field - 1023 : exponentOf(x * 2 ** 60) - 60;
}

// x * 2**n in steps that do not overflow a double; exact if the result is a normal number.
function timesPower(x, n) {
  while (n > 1000) {
    x *= 2 ** 1000;
    n -= 1000;
  }
  while (n < -1000) {
    x *= 2 ** -1000;
    n += 1000;
  }
  return x * 2 ** n;
}

function roundHalfEven(x) {
  const low = Math.floor(x);
  const rest = x - low;
  if (rest < 0.5) return low;
  if (rest > 0.5) return low + 1;
  return low % 2 === 0 ? low : low + 1;
}

// The nearest number of a format, ties to even. Overflow gives inf, or NaN if the format has no inf.
function roundTo(x, f) {
  if (Number.isNaN(x)) return NaN;
  if (x === 0) return x;
  const limit = f.has_inf ? Math.sign(x) * Infinity : NaN;
  if (!Number.isFinite(x)) return limit;
  const quantum = Math.max(exponentOf(x), 1 - f.bias) - f.mantissa_bits;
  const rounded = Math.sign(x) * timesPower(roundHalfEven(timesPower(Math.abs(x), -quantum)), quantum);
  return Math.abs(rounded) > f.max ? limit : rounded;
}

// The bits of a number that the format represents exactly, sign first.
function bitsOf(x, f) {
  const negative = x < 0 || Object.is(x, -0);
  const top = 2 ** f.exponent_bits - 1;
  let exponent = 0;
  let mantissa = 0;
  if (Number.isNaN(x)) {
    exponent = top;
    mantissa = f.has_inf ? 2 ** (f.mantissa_bits - 1) : 2 ** f.mantissa_bits - 1;
  } else if (!Number.isFinite(x)) {
    exponent = top;
  } else if (x !== 0) {
    const size = Math.abs(x);
    const power2 = Math.max(exponentOf(size), 1 - f.bias);
    const multiple = timesPower(size, f.mantissa_bits - power2);
    const normal = multiple >= 2 ** f.mantissa_bits;
    exponent = normal ? power2 + f.bias : 0;
    mantissa = normal ? multiple - 2 ** f.mantissa_bits : multiple;
  }
  return (
    (negative ? "1" : "0") +
    exponent.toString(2).padStart(f.exponent_bits, "0") +
    mantissa.toString(2).padStart(f.mantissa_bits, "0")
  );
}

// Stores a number in a format: the stored value, its bits, the relative error, and the state as named by formats.py.
function store(x, f) {
  const stored = roundTo(x, f);
  let state = "rounded";
  let error = 0;
  if (stored === x || (Number.isNaN(stored) && Number.isNaN(x))) {
    state = "exact";
  } else if (!Number.isFinite(stored)) {
    state = "overflow";
    error = Infinity;
  } else {
    error = Math.abs(stored - x) / Math.abs(x);
    if (stored === 0) state = "underflow";
    else if (Math.abs(stored) < 2 ** (1 - f.bias)) state = "subnormal";
  }
  // A NaN made from a negative number keeps its sign, as a cast does.
  const sign = Number.isNaN(stored) && x < 0 ? "1" : "";
  const bits = bitsOf(stored, f);
  return { value: stored, bits: sign ? sign + bits.slice(1) : bits, error, state };
}

// Parses decimal and hexadecimal (0x1p-24) numbers, inf and nan; null for anything else.
function parseNumber(text) {
  const clean = text
    .trim()
    .toLowerCase()
    .replace(/(\d)_(?=\d)/g, "$1");
  const word = /^([+-]?)(inf|infinity|nan)$/.exec(clean);
  if (word) return word[2] === "nan" ? NaN : word[1] === "-" ? -Infinity : Infinity;
  const hex = /^([+-]?)0x([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?\d+))?$/.exec(clean);
  if (hex && (hex[2] || hex[3])) {
    const digits = parseInt(hex[2] + hex[3], 16);
    const size = digits === 0 ? 0 : clampToDoubles(timesPower(digits, Number(hex[4] || 0) - 4 * hex[3].length), true);
    return hex[1] === "-" ? -size : size;
  }
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(clean)) return null;
  return clampToDoubles(Number(clean), /[1-9]/.test(clean.split("e")[0]));
}

// Numbers outside the range of doubles become the nearest finite nonzero double: 1e400 is still a number.
function clampToDoubles(x, notZero) {
  if (!Number.isFinite(x)) return Math.sign(x) * Number.MAX_VALUE;
  return x === 0 && notZero ? (Object.is(x, -0) ? -1 : 1) * Number.MIN_VALUE : x;
}

// The shares of a histogram over powers of two that a format loses at a scale: Reading.shares of gauges.
function shares(first, counts, amax, f, shift) {
  const below = (limit) => {
    let sum = 0;
    for (let i = 0; i < counts.length; i += 1) sum += counts[i] * clamp(limit - shift - (first + i), 0, 1);
    return sum;
  };
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (!total) return { flushed: 0, subnormal: 0, overflow: 0 };
  const flushed = below(f.flush) / total;
  const beyond = Math.log2(amax) + shift > f.most;
  return {
    flushed,
    subnormal: Math.max(below(f.normal) / total - flushed, 0),
    overflow: beyond ? 1 - below(f.most) / total : 0,
  };
}
