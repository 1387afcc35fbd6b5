// Which workers are selected. One place, read at the moment of a click: the row that was clicked may have been drawn
// long before the last change, so it hands over its name and nothing that it remembers.
import { cell } from './cell.js';
import { workers } from './deck.js';

/** A Set of names; replaced, never changed in place. */
export const selection = cell(new Set());

let anchor = null;

export function select(names) {
  selection.set(new Set(names));
}

/** Select or unselect one worker. */
export function toggle(name) {
  const next = new Set(selection.value);
  if (!next.delete(name)) next.add(name);
  anchor = name;
  selection.set(next);
}

/** Select everything from the worker that was last clicked to this one, in the order in which `shown` lists them. */
export function extend(name, shown) {
  const from = shown.indexOf(anchor);
  if (from < 0) return toggle(name);
  const to = shown.indexOf(name);
  anchor = name;
  return selection.set(new Set([...selection.value, ...shown.slice(Math.min(from, to), Math.max(from, to) + 1)]));
}

// A worker that is gone is not selected, and one that comes back under its name is another one.
workers.watch((known) => {
  if ([...selection.value].some((name) => !known.has(name))) select([...selection.value].filter((name) => known.has(name)));
});
