// A command to type elsewhere: shown whole, and copied by one press.
import { html } from '../core/html.js';
import { Icon } from './icons.js';
import { say } from './toast.js';

export function Copyable({ text }) {
  const copy = async (press) => {
    const code = press.currentTarget.previousElementSibling;
    try {
      await navigator.clipboard.writeText(text);
      say('Copied');
    } catch {
      // Over plain HTTP a browser gives no clipboard: then it is at least selected, ready for Ctrl-C.
      getSelection().selectAllChildren(code);
      say('Selected: copy it with your keyboard');
    }
  };
  return html`<div class="copyable"><pre class="command">${text}</pre><button class="icon-button" aria-label="Copy the command" title="Copy" onClick=${copy}><${Icon} name="copy" /></button></div>`;
}
