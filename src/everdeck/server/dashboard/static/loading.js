// A page of which not every file arrived (the network changed meanwhile, the daemon was being replaced) gets the rest,
// instead of saying "Opening" for ever. Not a module: if one of those is missing, none of them runs.
(function () {
  var MOST = 8;
  var KEPT = 'everdeck-loading';

  var pause = function (tries) { return Math.min(250 * Math.pow(2, tries), 8000); };

  // A style sheet can come later.
  addEventListener('error', function (event) {
    var link = event.target;
    if (!(link instanceof HTMLLinkElement) || link.rel !== 'stylesheet') return;
    var tries = Number(link.dataset.tries || 0);
    if (tries >= MOST) return;
    setTimeout(function () {
      var again = link.cloneNode();
      again.dataset.tries = tries + 1;
      link.replaceWith(again);
    }, pause(tries));
  }, true);

  // A module that did not arrive is not asked for again by the browser: the page is loaded anew. Its address still has
  // the token of a login link, because nothing of ours has run.
  addEventListener('load', function () {
    var opening = document.querySelector('#app > .boot');
    var tries = 0;
    try {
      tries = Number(sessionStorage.getItem(KEPT) || 0);
      if (opening && tries < MOST) sessionStorage.setItem(KEPT, tries + 1);
      else sessionStorage.removeItem(KEPT);
    } catch (e) { return; /* no storage: nobody would count */ }
    if (!opening) return;
    if (tries < MOST) setTimeout(function () { location.reload(); }, pause(tries));
    else opening.textContent = 'The page could not be loaded. Is the daemon up? Reload to try again; `everdeck ps` tells the same facts.';
  });
})();
