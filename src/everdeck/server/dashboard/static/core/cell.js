// A value that others may watch. Listeners hear of many changes at once, at most every `pauseMs`,
// so that fifty events a second cost a handful of renders, not fifty.
import { useEffect, useReducer } from './html.js';

/** A watched value. `pauseMs` is the least time between two notices. */
export function cell(initial, pauseMs = 0) {
  const listeners = new Set();
  let value = initial;
  let waiting = false;
  let heardAt = -Infinity;

  const notify = () => {
    waiting = false;
    heardAt = performance.now();
    for (const listener of [...listeners]) listener(value);
  };

  return {
    get value() { return value; },
    set(next) {
      if (Object.is(next, value)) return;
      value = next;
      this.touch();
    },
    /** Say that the inside of the value changed. */
    touch() {
      if (waiting) return;
      waiting = true;
      const rest = heardAt + pauseMs - performance.now();
      if (rest > 0) setTimeout(notify, rest);
      else queueMicrotask(notify);
    },
    watch(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** The value of a cell inside a component, which renders again when it changes. */
export function useCell(watched) {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    again(); // it may have changed between the first render and this effect
    return watched.watch(() => again());
  }, [watched]);
  return watched.value;
}
