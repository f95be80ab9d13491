/* Runs before anything is painted: the theme that was chosen last time. */
(function () {
  "use strict";
  var asked = new URLSearchParams(window.location.search).get("theme");
  var kept = null;
  try {
    kept = window.localStorage.getItem("phasewise.theme");
  } catch (error) {
    kept = null; // storage can be switched off
  }
  var theme = asked === "light" || asked === "dark" ? asked : kept;
  document.documentElement.dataset.theme = theme === "light" ? "light" : "dark";
})();
