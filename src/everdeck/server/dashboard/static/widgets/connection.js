// Whether what you see is now. "Connected" (the daemon answers this page) and "supervised" (somebody owns the deck)
// are two facts, and both are said in words.
import { html } from '../core/html.js';
import { useCell } from '../core/cell.js';
import { about, connection, retryNow } from '../core/deck.js';
import { absolute } from '../core/format.js';
import { Countdown, When } from './when.js';

/** 'live' | 'connecting' | 'lost' | 'asleep' | 'unsupervised' */
export function useStanding() {
  const { phase } = useCell(connection);
  const deck = useCell(about);
  return phase === 'live' && deck && deck.supervised === false ? 'unsupervised' : phase;
}

const WORDS = { live: 'Live', connecting: 'Connecting', lost: 'Not connected', asleep: 'Paused', unsupervised: 'Not supervised' };
// For phones: the banner below the bar says the rest.
const SHORT = { live: 'Live', connecting: '…', lost: 'Offline', asleep: 'Paused', unsupervised: 'No owner' };

export function ConnectionPill() {
  const standing = useStanding();
  const deck = useCell(about);
  return html`
    <span class="pill standing-${standing}" role="status" data-standing=${standing}
      title=${standing === 'live' && deck ? `Owned by pid ${deck.owner_pid}` : undefined}>
      <span class="pill-dot" aria-hidden="true"></span><span class="pill-words">${WORDS[standing]}</span><span class="pill-short">${SHORT[standing]}</span>
    </span>`;
}

export function ConnectionBanner() {
  const standing = useStanding();
  const { since, retryAt } = useCell(connection);
  if (standing === 'lost') {
    return html`
      <div class="banner tone-bad" role="alert">
        <p><strong>Not connected.</strong> The daemon does not answer since <time title=${absolute(since)}>${new Date(since).toLocaleTimeString([], { hour12: false })}</time>;
        what you see is from then. Adoptable workers keep running without it, and nobody restarts them until it is back.
        ${retryAt && html` Trying again <${Countdown} until=${new Date(retryAt).toISOString()} />.`}</p>
        <button class="button is-small" onClick=${retryNow}>Try now</button>
      </div>`;
  }
  if (standing === 'unsupervised') {
    return html`
      <div class="banner tone-warn" role="alert">
        <p><strong>Not supervised.</strong> Workers may be up, but no process owns this deck: nothing will be restarted or stopped.
        Start the owner with <code>everdeck up</code>.</p>
      </div>`;
  }
  return null;
}
