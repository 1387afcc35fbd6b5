// Runs before the first paint, so that a chosen theme does not flash the other one. Not a module: modules wait.
(function () {
  try {
    var theme = localStorage.getItem('everdeck-theme');
    if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
  } catch (e) { /* no storage: the system's preference holds */ }
})();
