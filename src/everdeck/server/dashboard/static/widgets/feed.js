// A satellite's feed: its account, its connection in words, what waits, is in flight, done and set aside, what is to be
// sent; dead letters and unsent messages can be tried again or dropped. Nothing here shows a token: the API has none.
import { html, useEffect, useState } from '../core/html.js';
import { api, may } from '../core/api.js';
import { visible } from './ansi.js';
import { say } from './toast.js';

const EVERY_MS = 3000;

export function Feed({ name }) {
  const [feed, setFeed] = useState(null);
  const [problem, setProblem] = useState(null);
  const read = async (signal) => {
    if (document.visibilityState !== 'visible') return;
    try {
      setFeed(await api.feed(name, signal));
      setProblem(null);
    } catch (failure) {
      if (failure.name !== 'AbortError') setProblem(failure);
    }
  };
  useEffect(() => {
    const ending = new AbortController();
    read(ending.signal);
    const timer = setInterval(() => read(ending.signal), EVERY_MS);
    return () => { ending.abort(); clearInterval(timer); };
  }, [name]);
  const decide = async (letter, verb) => {
    try {
      const { done } = await api.decide(name, letter.number, verb);
      say(done ? `${letter.number}: ${verb === 'retry' ? 'tried again' : 'dropped'}` : `${letter.number} is gone already`);
    } catch (failure) {
      say(failure.message);
    }
    read();
  };
  if (!feed) return problem && html`<section class="panel feed" aria-label="Feed"><p class="feed-error" role="alert">${problem.message}</p></section>`;
  const { status, letters } = feed;
  const numbers = [
    ['Waiting', status.waiting], ['In flight', status.in_flight], ['Done', status.done], ['Dead', status.dead],
    ['To send', status.to_send], ['Unsent', status.unsent],
  ];
  return html`
    <section class="panel feed" aria-label="Feed">
      <header class="panel-head"><h2>Feed</h2><span class="quiet">${visible(status.account || status.kind)}</span></header>
      <p class="feed-connection"><b class=${`feed-${status.connection}`}>${status.connection}</b>
        ${status.last_contact_at && html` · last contact <time datetime=${status.last_contact_at}>${new Date(status.last_contact_at).toLocaleTimeString()}</time>`}</p>
      ${status.error && html`<p class="feed-error" role="status">${visible(status.error)}</p>`}
      <dl class="fact-strip feed-numbers">${numbers.map(([title, value]) => html`<div key=${title}><dt>${title}</dt><dd class="num">${value}</dd></div>`)}</dl>
      ${letters.length > 0 && html`<ul class="feed-letters" aria-label="Set aside">${letters.map((letter) => html`
        <li key=${letter.number}><p><b>${letter.number}</b> ${visible(letter.subject || letter.text)}</p><p class="feed-error">${visible(letter.error)}</p>
          ${may('operate') && html`<p class="feed-acts"><button type="button" class="button is-small" onClick=${() => decide(letter, 'retry')}>Retry</button> <button type="button" class="button is-small is-danger-quiet" onClick=${() => decide(letter, 'drop')}>Drop</button></p>`}</li>`)}</ul>`}
    </section>`;
}
