// Terminal colours in log lines. A line becomes text nodes and spans, never markup: whatever a worker prints is shown,
// and nothing it prints is run. Pure, but for `paint`, which makes nodes.
//
// Understands SGR (ECMA-48 §8.3.117): bold, dim, italic, underline, inverse, 16, 256 and 24-bit colours. Other escape
// sequences (cursor movement, titles, hyperlinks) are dropped.

// CSI … final byte | OSC … BEL or ST | other two-character escapes | control characters except tab
const ESCAPE = /\x1b\[([0-9:;<=>?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?|[\x00-\x08\x0b-\x1f\x7f]/g;

/** The text alone. */
export const plain = (line) => line.replace(ESCAPE, '');

/** [{text, style}] where style is null or {bold, dim, italic, underline, inverse, fg, bg}. */
export function runs(line) {
  const found = [];
  let style = {};
  let from = 0;
  const add = (text) => { if (text) found.push({ text, style: Object.keys(style).length ? style : null }); };
  for (const match of line.matchAll(ESCAPE)) {
    add(line.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[2] === 'm') style = afterCodes(style, match[1]);
  }
  add(line.slice(from));
  return found;
}

function afterCodes(style, codes) {
  let next = { ...style };
  const list = codes === '' ? [0] : codes.split(/[;:]/).map(Number);
  for (let i = 0; i < list.length; i += 1) {
    const code = list[i];
    if (code === 0) next = {};
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 7) next.inverse = true;
    else if (code === 22) { delete next.bold; delete next.dim; }
    else if (code === 23) delete next.italic;
    else if (code === 24) delete next.underline;
    else if (code === 27) delete next.inverse;
    else if (code === 39) delete next.fg;
    else if (code === 49) delete next.bg;
    else if (code >= 30 && code <= 37) next.fg = code - 30;
    else if (code >= 90 && code <= 97) next.fg = code - 82;
    else if (code >= 40 && code <= 47) next.bg = code - 40;
    else if (code >= 100 && code <= 107) next.bg = code - 92;
    else if (code === 38 || code === 48) {
      const side = code === 38 ? 'fg' : 'bg';
      if (list[i + 1] === 5) { next[side] = palette(list[i + 2]); i += 2; }
      else if (list[i + 1] === 2) { next[side] = rgb(list[i + 2], list[i + 3], list[i + 4]); i += 4; }
    }
  }
  return next;
}

function palette(n) {
  if (!(n >= 0 && n <= 255)) return 7;
  if (n < 16) return n;
  if (n >= 232) return rgb(8 + (n - 232) * 10, 8 + (n - 232) * 10, 8 + (n - 232) * 10);
  const step = (v) => (v ? 55 + v * 40 : 0);
  return rgb(step(Math.floor((n - 16) / 36)), step(Math.floor((n - 16) / 6) % 6), step((n - 16) % 6));
}

const byte = (n) => Math.min(255, Math.max(0, Number(n) || 0));
const rgb = (r, g, b) => `rgb(${byte(r)} ${byte(g)} ${byte(b)})`;

/** Fill an element with a painted line. */
export function paint(element, line) {
  if (!line.includes('\x1b')) {
    element.textContent = plain(line);
    return;
  }
  for (const { text, style } of runs(line)) {
    if (!style) {
      element.append(text);
      continue;
    }
    const span = document.createElement('span');
    span.textContent = text;
    for (const flag of ['bold', 'dim', 'italic', 'underline', 'inverse']) if (style[flag]) span.classList.add(`ansi-${flag}`);
    if (typeof style.bg === 'number') span.classList.add(`ansi-bg-${style.bg}`);
    else if (style.bg) {
      span.style.backgroundColor = style.bg;
      span.style.color = isBright(style.bg) ? '#000' : '#fff';
    }
    if (typeof style.fg === 'number') span.classList.add(`ansi-fg-${style.fg}`);
    else if (style.fg) {
      span.style.color = style.fg;
      // A worker chooses its colours for one terminal; the theme bounds their lightness so that they can be read on
      // either ground. A browser that does not know relative colours keeps the line above.
      if (!style.bg) span.style.color = `oklch(from ${style.fg} clamp(var(--ansi-darkest), l, var(--ansi-brightest)) c h)`;
    }
    element.append(span);
  }
}

function isBright(colour) {
  const [r, g, b] = colour.match(/\d+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140;
}

/** Text in which nothing acts: controls and marks that turn the direction of text are escapes (UAX #9, table of controls). */
export const visible = (text) => (text ?? '').replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`);
