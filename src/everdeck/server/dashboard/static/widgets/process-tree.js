// The worker's processes, each under its parent. A process whose parent is not among them stands at the root.
import { html } from '../core/html.js';
import { bytes, plural } from '../core/format.js';

const STATES = { R: 'running', S: 'sleeping', D: 'in a system call', Z: 'zombie', T: 'stopped', t: 'traced', I: 'idle' };

export function ProcessTree({ tree }) {
  const processes = tree || [];
  const pids = new Set(processes.map((process) => process.pid));
  const childrenOf = (pid) => processes.filter((process) => process.ppid === pid);
  const roots = processes.filter((process) => !pids.has(process.ppid));
  const branch = (process) => html`
    <li key=${process.pid}>
      <div class="process" title=${commandLine(process.command)}>
        <span class="num process-pid">${process.pid}</span>
        <span class="process-name">${process.name}</span>
        <span class="quiet process-state">${STATES[process.state] || process.state}</span>
        <span class="num process-rss">${bytes(process.rss_bytes)}</span>
        <code class="process-command">${commandLine(process.command)}</code>
      </div>
      ${childrenOf(process.pid).length > 0 && html`<ul>${childrenOf(process.pid).map(branch)}</ul>`}
    </li>`;
  return html`
    <section class="panel" aria-label="Processes">
      <header class="panel-head"><h2>Processes</h2><span class="quiet">${processes.length ? plural(processes.length, 'process', 'processes') : ''}</span></header>
      ${processes.length ? html`<ul class="process-tree">${roots.map(branch)}</ul>` : html`<p class="panel-empty">No process is running.</p>`}
    </section>`;
}

const commandLine = (command) => (Array.isArray(command) ? command.join(' ') : command || '');
