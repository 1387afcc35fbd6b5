// Only the rows that can be seen are in the document; the page itself scrolls, so that phones behave as phones do.
import { html, useEffect, useLayoutEffect, useRef, useState } from '../core/html.js';

const MARGIN_PX = 400;

/**
 * heights: Float64Array-like of row heights; keep: an index that stays in the document (the focused row).
 * row(index, style) renders one row; onRange(first, last) hears what can be seen.
 */
export function Virtual({ heights, keep, row, onRange, className, ...rest }) {
  const frame = useRef(null);
  const [view, setView] = useState({ top: 0, bottom: 1200 });
  const offsets = offsetsOf(heights);
  const count = heights.length;

  useLayoutEffect(() => {
    let asked = 0;
    const measure = () => {
      asked = 0;
      if (!frame.current) return;
      const box = frame.current.getBoundingClientRect();
      const top = Math.floor(Math.max(0, -box.top - MARGIN_PX) / 200) * 200;
      const bottom = Math.ceil((innerHeight - box.top + MARGIN_PX) / 200) * 200;
      setView((before) => (before.top === top && before.bottom === bottom ? before : { top, bottom }));
    };
    const soon = () => { asked ||= requestAnimationFrame(measure); };
    measure();
    addEventListener('scroll', soon, { passive: true });
    addEventListener('resize', soon, { passive: true });
    return () => {
      removeEventListener('scroll', soon);
      removeEventListener('resize', soon);
      cancelAnimationFrame(asked);
    };
  }, [count]);

  const first = indexAt(offsets, view.top);
  const last = Math.min(count - 1, indexAt(offsets, view.bottom));
  useEffect(() => { onRange?.(first, last); });

  const indices = [];
  if (keep >= 0 && keep < first) indices.push(keep);
  for (let i = first; i <= last; i += 1) indices.push(i);
  if (keep > last && keep < count) indices.push(keep);

  return html`
    <div class="virtual ${className || ''}" ref=${frame} style=${{ height: `${offsets[count]}px` }} ...${rest}>
      ${indices.map((i) => row(i, { transform: `translateY(${offsets[i]}px)`, height: `${heights[i]}px` }))}
    </div>`;
}

/** Scroll so that a row is fully seen below `above` px of sticky header and above `below` px of footer. */
export function reveal(frame, heights, index, above, below) {
  let y = frame.getBoundingClientRect().top;
  for (let i = 0; i < index; i += 1) y += heights[i];
  if (y < above) scrollBy({ top: y - above });
  else if (y + heights[index] > innerHeight - below) scrollBy({ top: y + heights[index] - innerHeight + below });
}

function offsetsOf(heights) {
  const offsets = new Float64Array(heights.length + 1);
  for (let i = 0; i < heights.length; i += 1) offsets[i + 1] = offsets[i] + heights[i];
  return offsets;
}

function indexAt(offsets, y) {
  let low = 0;
  let high = offsets.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (offsets[middle] <= y) low = middle;
    else high = middle - 1;
  }
  return Math.max(0, low);
}
