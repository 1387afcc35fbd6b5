// Keyboard: a view says which keys it hears and what they do; the help dialog shows exactly these.
import { useLayoutEffect } from './html.js';

const layers = [];
let held = false;

/** While a question is on its way to the screen, a key typed ahead must not act on what lies under it. */
export const holdKeys = (on) => { held = on; };

/** keys: {'j': ['Next worker', run], …}; heard while the component is mounted, the newest layer first. */
export function useKeys(group, keys) {
  // With the paint, not after it: what can be seen can be driven.
  useLayoutEffect(() => {
    const layer = { group, keys };
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  });
}

/** What is heard now, by group; where two layers hear one key, the newer one. */
export function knownKeys() {
  const groups = new Map();
  const taken = new Set();
  for (const { group, keys } of layers.toReversed()) {
    const heard = Object.entries(keys).filter(([key]) => !taken.has(key)).map(([key, [label]]) => ({ key, label }));
    for (const { key } of heard) taken.add(key);
    groups.set(group, [...(groups.get(group) || []), ...heard]);
  }
  return [...groups].map(([group, keys]) => ({ group, keys }));
}

addEventListener('keydown', (press) => {
  if (press.defaultPrevented || press.ctrlKey || press.metaKey || press.altKey) return;
  const target = press.target;
  const typing = target instanceof Element && target.closest('input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]');
  if (typing) {
    if (press.key === 'Escape') target.blur();
    return;
  }
  if (document.querySelector('dialog[open]')) return;
  if (held) {
    press.preventDefault();
    return;
  }
  for (const { keys } of layers.toReversed()) {
    const entry = keys[press.key];
    if (entry) {
      press.preventDefault();
      entry[1](press);
      return;
    }
  }
});
