// The shell: top bar, the view the address asks for, and what lies over it (questions, notices, help).
import { html, render, useEffect } from './core/html.js';
import { may, me, session } from './core/api.js';
import { useCell } from './core/cell.js';
import { about, open } from './core/deck.js';
import { useKeys } from './core/keys.js';
import { go, link, route } from './core/router.js';
import { ConnectionBanner, ConnectionPill } from './widgets/connection.js';
import { Confirm } from './widgets/confirm.js';
import { Help, showHelp } from './widgets/help.js';
import { Icon } from './widgets/icons.js';
import { ThemeSwitch } from './widgets/theme-switch.js';
import { Toasts } from './widgets/toast.js';
import { AddView } from './views/add.js';
import { DeckView } from './views/deck.js';
import { EventsView } from './views/events.js';
import { LoginView } from './views/login.js';
import { LogsView } from './views/logs.js';
import { WorkerView } from './views/worker.js';

function App() {
  const here = useCell(route);
  const known = useCell(session);
  useCell(me); // what is shown depends on the role
  useEffect(() => { scrollTo(0, 0); }, [here.path]);
  useKeys('Everywhere', {
    d: ['Deck', () => go('/')],
    v: ['Events', () => go('/events')],
    ...(may('admin') ? { c: ['Add a worker', () => go('/add')] } : {}),
    '?': ['This help', showHelp],
  });
  if (known === 'out') return html`<${LoginView} />`;
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById('main').focus(); }}>Skip to content</a>
    <${TopBar} here=${here} />
    <${ConnectionBanner} />
    <main id="main" tabindex="-1"><${View} here=${here} /></main>
    <${Confirm} /><${Help} /><${Toasts} />`;
}

function View({ here }) {
  switch (here.view) {
    case 'deck': return html`<${DeckView} params=${here.params} />`;
    case 'worker': return html`<${WorkerView} name=${here.name} key=${here.name} />`;
    case 'events': return html`<${EventsView} params=${here.params} />`;
    case 'logs': return html`<${LogsView} params=${here.params} />`;
    case 'add': return html`<${AddView} params=${here.params} key=${here.params.edit || here.params.clone || 'new'} />`;
    default: return html`<div class="state-page"><h1>Nothing here</h1><p>This address leads to no view.</p><a class="button is-primary" href=${link('/')}>To the deck</a></div>`;
  }
}

const PLACES = [['deck', '/', 'Deck'], ['events', '/events', 'Events'], ['add', '/add', 'Add']];

function TopBar({ here }) {
  const deck = useCell(about);
  const place = here.view === 'worker' || here.view === 'logs' ? 'deck' : here.view;
  return html`
    <header class="top-bar">
      <a class="brand" href=${link('/')} aria-label="Everdeck, to the deck">
        <svg viewBox="0 0 32 32" width="26" height="26" aria-hidden="true"><ellipse cx="16" cy="16" rx="14" ry="6" transform="rotate(-24 16 16)" class="brand-orbit" /><circle cx="16" cy="16" r="6.5" class="brand-planet" /><circle cx="28.2" cy="9.6" r="2.6" class="brand-moon" /></svg>
        <span class="brand-name">Everdeck</span>
      </a>
      ${deck?.state_dir && html`<span class="brand-deck" title=${deck.state_dir}>${deck.state_dir.split('/').slice(-2).join('/')}</span>`}
      <nav aria-label="Views">${PLACES.filter(([key]) => key !== 'add' || may('admin')).map(([key, path, title]) => html`<a key=${key} href=${link(path)} aria-current=${place === key ? 'page' : undefined}>${key === 'add' && html`<${Icon} name="plus" size=${14} />`}<span class=${key === 'add' ? 'nav-add' : undefined}>${title}</span></a>`)}</nav>
      <div class="top-end"><${ConnectionPill} /><${ThemeSwitch} /><button class="icon-button help-button" aria-label="Help and log out" title="Help (?)" onClick=${showHelp}>?</button></div>
    </header>`;
}

const place = document.getElementById('app');
place.replaceChildren();
render(html`<${App} />`, place);
open();
