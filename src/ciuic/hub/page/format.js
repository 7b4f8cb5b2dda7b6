// Numbers with units, in the words of the command line (ciuic/units.py).

const NOTHING = "–";

export function whole(value) {
  return value == null ? NOTHING : Math.round(value).toLocaleString("en-US");
}

export function count(value) {
  return value == null ? NOTHING : scaled(value, ["", "k", "M", "G", "T"], (n, unit) => n.toFixed(unit ? 1 : 0) + unit);
}

export function bytes(value) {
  if (value == null) return NOTHING;
  return scaled(value, ["B", "kB", "MB", "GB", "TB"], (n, unit) => `${n.toFixed(unit === "B" ? 0 : 1)} ${unit}`);
}

export function rate(bitsPerS) {
  if (bitsPerS == null) return NOTHING;
  return scaled(bitsPerS, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"], (n, unit) => `${significant(n)} ${unit}`);
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return NOTHING;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds) % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function percent(share, digits = 0) {
  return share == null || !Number.isFinite(share) ? NOTHING : `${(share * 100).toFixed(digits)} %`;
}

export function loss(value) {
  return value == null ? NOTHING : value.toFixed(3);
}

export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}

export function plural(number, word, words = `${word}s`) {
  return `${whole(number)} ${number === 1 ? word : words}`;
}

export function joined(items) {
  return items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
}

// Three significant digits without an exponent: 47.2, 5, 105.
function significant(value) {
  return String(Number(value.toPrecision(3)));
}

function scaled(value, units, write) {
  let rest = value;
  let place = 0;
  while (Math.abs(rest) >= 999.5 && place < units.length - 1) {
    rest /= 1000;
    place += 1;
  }
  return write(rest, units[place]);
}
