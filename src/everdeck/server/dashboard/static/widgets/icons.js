// Line icons, drawn here on a 16 px grid.
import { html } from '../core/html.js';

const PATHS = {
  start: 'M5 3.2v9.6L12.6 8z',
  stop: 'M4 4h8v8H4z',
  restart: 'M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3',
  reset: 'M3 8a5 5 0 1 0 1.6-3.7M3 2v3h3M8 5.5V8l1.8 1.2',
  remove: 'M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5M6.8 7v3.8M9.2 7v3.8',
  search: 'M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.4 10.4 14 14',
  plus: 'M8 3v10M3 8h10',
  close: 'M4 4l8 8M12 4l-8 8',
  down: 'M4 6l4 4 4-4',
  right: 'M6 4l4 4-4 4',
  up: 'M4 10l4-4 4 4',
  download: 'M8 2.5v7.5M4.8 7 8 10.2 11.2 7M3 13.3h10',
  pause: 'M5.5 3.5v9M10.5 3.5v9',
  lock: 'M4 7.5h8v6H4zM5.7 7.5V5.3a2.3 2.3 0 0 1 4.6 0v2.2',
  link: 'M6.8 9.2 9.2 6.8M7.5 4.7l1.3-1.3a2.7 2.7 0 0 1 3.8 3.8l-1.3 1.3M8.5 11.3l-1.3 1.3a2.7 2.7 0 0 1-3.8-3.8l1.3-1.3',
  sun: 'M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zM8 1.5v1.6M8 12.9v1.6M1.5 8h1.6M12.9 8h1.6M3.4 3.4l1.1 1.1M11.5 11.5l1.1 1.1M12.6 3.4l-1.1 1.1M4.5 11.5l-1.1 1.1',
  moon: 'M13.2 9.6A5.6 5.6 0 0 1 6.4 2.8a5.6 5.6 0 1 0 6.8 6.8z',
  auto: 'M8 13.5a5.5 5.5 0 1 0 0-11zM8 2.5a5.5 5.5 0 0 0 0 11',
  back: 'M9.5 3.5 5 8l4.5 4.5',
  wrap: 'M2.5 4h11M2.5 8h8.7a2 2 0 0 1 0 4H8.5M10 10.4 8.4 12l1.6 1.6M2.5 12h3',
  follow: 'M8 2.5v8M4.5 7.5 8 11l3.5-3.5M3 13.5h10',
  copy: 'M6 6h7.5v7.5H6zM10 6V2.5H2.5V10H6',
  edit: 'M10.8 2.8 13.2 5.2 5.6 12.8 2.5 13.5 3.2 10.4z',
  clone: 'M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3M9.5 7.7v3.6M7.7 9.5h3.6',
  rows: 'M2.5 4h11M2.5 8h11M2.5 12h11',
  logs: 'M3 3.5h7M3 8h10M3 12.5h6',
  more: 'M3.5 8h.01M8 8h.01M12.5 8h.01',
};

const FILLED = new Set(['start', 'stop']);

export const Icon = ({ name, size = 16 }) => html`
  <svg class=${FILLED.has(name) ? 'icon is-filled' : 'icon'} width=${size} height=${size} viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
