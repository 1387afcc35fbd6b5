// CPU and memory over a chosen time; what is older than the daemon comes from its disk. uPlot draws; colours are read from the theme and drawn again when it changes.
import { html, useEffect, useRef, useState } from '../core/html.js';
import { api } from '../core/api.js';
import { connection } from '../core/deck.js';
import { bytes, percent } from '../core/format.js';
import uPlot from '../vendor/uPlot.esm.js';

const EVERY_MS = 5000;
const RANGES = [[3600, 'hour'], [21_600, '6 hours'], [86_400, 'day'], [604_800, 'week'], [2_592_000, '30 days']];

export function Plots({ name, alive }) {
  const [ring, setRing] = useState(null);
  const [seconds, setSeconds] = useState(RANGES[0][0]);
  useEffect(() => {
    let live = true;
    const read = async () => {
      if (document.visibilityState !== 'visible' || connection.value.phase === 'lost') return;
      try {
        const found = (await api.samples([name], { seconds }))[name];
        if (live) setRing(found || { at: [], cpu: [], rss: [] });
      } catch {
        // The banner says that we are not connected; the plot keeps what it has.
      }
    };
    read();
    const timer = setInterval(read, EVERY_MS);
    return () => {
      live = false;
      clearInterval(timer);
    };
  }, [name, seconds]);
  const title = RANGES.find(([value]) => value === seconds)[1];
  const few = !ring || ring.rss.filter((value) => value !== null).length < 2;
  return html`
    <section class="panel plots" aria-label="Resources over the last ${title}">
      <header class="panel-head"><h2>Resources</h2><label class="choice"><span class="unseen">Time shown</span><select onChange=${(e) => setSeconds(Number(e.target.value))}>
        ${RANGES.map(([value, text]) => html`<option key=${value} value=${value} selected=${value === seconds}>last ${text}</option>`)}</select></label></header>
      ${few ? html`<p class="panel-empty">${ring === null ? 'Reading samples…' : alive ? 'Samples are taken while somebody looks: the first ones arrive in a few seconds.' : 'No process to measure.'}</p>` : html`
        <${Plot} title="CPU" at=${ring.at} values=${ring.cpu} format=${percent} stroke="--tide" floor=${5} seconds=${seconds} over=${title} />
        <${Plot} title="Memory" at=${ring.at} values=${ring.rss} format=${bytes} stroke="--moon" floor=${4e6} seconds=${seconds} over=${title} />`}
    </section>`;
}

function Plot({ title, at, values, format, stroke, floor, seconds, over }) {
  const holder = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const draw = () => {
      if (!holder.current) return; // the last notice of an observer may come after the plot has left
      plot.current?.destroy();
      plot.current = new uPlot(options(holder.current, format, stroke, floor, seconds), data(at, values), holder.current);
    };
    draw();
    const resize = new ResizeObserver(() => holder.current && plot.current?.setSize({ width: holder.current.clientWidth, height: 110 }));
    resize.observe(holder.current);
    const scheme = matchMedia('(prefers-color-scheme: dark)');
    scheme.addEventListener('change', draw);
    addEventListener('everdeck-theme', draw);
    return () => {
      resize.disconnect();
      scheme.removeEventListener('change', draw);
      removeEventListener('everdeck-theme', draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [seconds]);
  useEffect(() => { plot.current?.setData(data(at, values)); }, [at, values]);
  const known = values.filter((value) => value !== null);
  const most = known.length ? Math.max(...known) : null;
  return html`
    <figure class="plot"><figcaption><span>${title}</span><span class="num"><b>${format(values.at(-1))}</b> <span class="quiet">now</span> · ${format(most)} <span class="quiet">peak</span></span></figcaption>
      <div class="plot-canvas" ref=${holder} role="img" aria-label="${title}: ${format(values.at(-1))} now, ${format(most)} at most in the last ${over}"></div>
    </figure>`;
}

const data = (at, values) => [at, values];

const day = (seconds) => new Date(seconds * 1000).toLocaleDateString([], { day: 'numeric', month: 'short' });
const clock = (seconds, precise) => new Date(seconds * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second: precise ? '2-digit' : undefined, hour12: false });

function options(holder, format, stroke, floor, seconds) {
  const style = getComputedStyle(document.documentElement);
  const colour = (token) => style.getPropertyValue(token).trim();
  const axis = {
    stroke: colour('--ink-3'), font: `11px ${style.getPropertyValue('--font').trim()}`,
    grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false },
  };
  return {
    width: holder.clientWidth, height: 110, padding: [6, 8, 0, 0], legend: { show: false },
    cursor: { y: false, points: { size: 6 }, sync: { key: 'everdeck-plots' } },
    scales: {
      x: { time: true, range: (_u, low, high) => [Math.max(low, high - seconds), high] },
      y: { range: (_u, _low, high) => [0, Math.max(floor, (high || 0) * 1.15)] },
    },
    axes: [
      { ...axis, size: 22, space: 70, values: (_u, splits, _axis, _space, step) => splits.map((s) => (step >= 86_400 ? day(s) : clock(s, step < 60))) },
      { ...axis, size: 58, space: 34, values: (_u, splits) => splits.map((s) => format(s)) },
    ],
    series: [{}, { stroke: colour(stroke), width: 1.5, fill: colour(`${stroke}-wash`), points: { show: false }, spanGaps: false }],
  };
}
