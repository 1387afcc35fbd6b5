// A small line of recent values, scaled to its own maximum (but never below `floor`, so that noise looks like calm).
import { html } from '../core/html.js';

const WIDTH = 64;
const HEIGHT = 18;

export function Sparkline({ values, floor = 1, label }) {
  const points = (values || []).filter((value) => value !== null && value !== undefined);
  if (points.length < 2) return html`<svg class="spark is-empty" viewBox="0 0 ${WIDTH} ${HEIGHT}" aria-hidden="true"><path d="M0 ${HEIGHT - 1.5}H${WIDTH}" class="spark-base" /></svg>`;
  const top = Math.max(floor, ...points) * 1.05;
  const step = WIDTH / (points.length - 1);
  const line = points.map((value, i) => `${i ? 'L' : 'M'}${(i * step).toFixed(1)} ${(HEIGHT - 1.5 - (value / top) * (HEIGHT - 3)).toFixed(1)}`).join('');
  return html`
    <svg class="spark" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${label}>
      <path d="${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z" class="spark-area" />
      <path d=${line} class="spark-line" />
    </svg>`;
}
