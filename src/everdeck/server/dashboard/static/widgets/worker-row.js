// One worker in the table. Renders again only when something it shows has changed.
import { html, classes, Component } from '../core/html.js';
import { bytes, exit, percent, whole } from '../core/format.js';
import { linkToWorker } from '../core/router.js';
import { plain } from './ansi.js';
import { Icon } from './icons.js';
import { Phase } from './phase.js';
import { Sparkline } from './sparkline.js';
import { allowed, VERBS } from './verbs.js';
import { Countdown, Uptime } from './when.js';

/** The last line as the row shows it: what the worker said, or quietly the daemon's own note between two runs. */
function lastLine(line) {
  if (!line) return html`<span class="quiet">no output yet</span>`;
  const note = line.match(/^--- everdeck \S+ (started|ended) pid=\d+ ?(.*?) ?---$/);
  if (!note) return plain(line);
  return html`<span class="quiet">${note[1] === 'ended' ? `ended: ${note[2]}` : 'no output since its start'}</span>`;
}

/** Its labels behind its name; the template's is plain, and stands above the group when there are groups. */
const tags = (labels, grouped) => Object.entries(labels || {}).filter(([key, value]) => value && !(grouped && key === 'template')).map(([key, value]) => (
  key === 'template' ? html`<span class="label-tag" key=${key} title="Template">${value}</span>` : html`<span class="label-tag" key=${key} title="Label">${key}=${value}</span>`));

const SHOWN = ['status', 'spark', 'line', 'selected', 'active', 'index', 'transform', 'height', 'grouped'];

export class WorkerRow extends Component {
  shouldComponentUpdate(next) {
    return SHOWN.some((key) => next[key] !== this.props[key]);
  }

  render({ status, spark, line, selected, active, index, transform, height, grouped, onSelect, onActivate, onAct }) {
    const end = exit(status.exit, status.state === 'stopped');
    const verb = VERBS.stop.fits(status) ? 'stop' : status.state === 'failed' ? 'reset' : 'start';
    const tab = active ? 0 : -1;
    return html`
      <div role="row" class=${classes('worker-row', selected && 'is-selected', active && 'is-active')} style=${{ transform, height }}
        aria-rowindex=${index + 2} aria-selected=${selected ? 'true' : 'false'} tabindex=${tab}
        data-worker=${status.name} data-state=${status.state} onFocus=${() => onActivate(status.name)}>
        <div role="gridcell" class="c-pick"><label class="pick">
          <input type="checkbox" checked=${selected} tabindex=${tab} aria-label="Select ${status.name}" onClick=${(e) => onSelect(status.name, e.shiftKey)} />
        </label></div>
        <div role="gridcell" class="c-name">
          <${Phase} state=${status.state} />
          <div class="name-lines">
            <span class="name-line"><a href=${linkToWorker(status.name)} class="name" tabindex=${tab} title=${status.name}>${status.name}</a>${tags(status.labels, grouped)}</span>
            <span class="under"><span class="state-text state-${status.state}">${status.state}</span>
              ${status.backoff_until && status.state === 'backoff' && html` <${Countdown} until=${status.backoff_until} />`}
              <span class="sep">·</span>${status.lifetime}<span class="sep">·</span>${status.adopted ? 'adopted' : 'own'}</span>
          </div>
        </div>
        <div role="gridcell" class="c-pid num">${status.pid ?? html`<span class="quiet">–</span>`}</div>
        <div role="gridcell" class="c-uptime num">${status.pid ? html`<${Uptime} since=${status.started_at} />` : html`<span class="quiet">–</span>`}</div>
        <div role="gridcell" class="c-restarts num" title="${status.restarts} restarts, ${status.crashes} crashes">
          <span class=${status.restarts ? '' : 'quiet'}>${whole(status.restarts)}</span>${status.crashes > 0 && html`<span class="crashes">${whole(status.crashes)} crashed</span>`}</div>
        <div role="gridcell" class="c-health" title=${status.health || undefined}>${status.health ? html`<span class=${status.state === 'unhealthy' ? 'health-bad' : ''}>${status.health}</span>` : html`<span class="quiet">–</span>`}</div>
        <div role="gridcell" class="c-cpu meter"><${Sparkline} values=${status.pid ? spark?.cpu : null} floor=${5} label="CPU, last ten minutes" /><span class="num">${percent(status.cpu_percent)}</span></div>
        <div role="gridcell" class="c-rss meter"><${Sparkline} values=${status.pid ? spark?.rss : null} floor=${1e6} label="Memory, last ten minutes" /><span class="num">${bytes(status.rss_bytes)}</span></div>
        <div role="gridcell" class="c-exit num tone-${end.tone}">${end.text}</div>
        <div role="gridcell" class="c-line" title=${line ? plain(line) : undefined}>${status.status_text ? html`<span class="status-text">${status.status_text}</span>` : lastLine(line)}</div>
        <div role="gridcell" class="c-acts">
          ${allowed(verb) && html`<button class="icon-button" tabindex=${tab} aria-label="${VERBS[verb].label} ${status.name}" title=${VERBS[verb].label} onClick=${() => onAct(verb, status.name)}><${Icon} name=${verb} /></button>`}
          ${allowed('restart') && html`<button class="icon-button" tabindex=${tab} aria-label="Restart ${status.name}" title="Restart" disabled=${!VERBS.restart.fits(status)} onClick=${() => onAct('restart', status.name)}><${Icon} name="restart" /></button>`}
          ${allowed('remove') && html`<button class="icon-button" tabindex=${tab} aria-label="Remove ${status.name}" title="Remove" onClick=${() => onAct('remove', status.name)}><${Icon} name="remove" /></button>`}
        </div>
      </div>`;
  }
}
