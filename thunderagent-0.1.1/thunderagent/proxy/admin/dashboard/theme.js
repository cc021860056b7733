// Before anything is drawn: the theme that was chosen here, if one was; else the system's, by the style sheet.
(() => {
  try {
    const chosen = localStorage.getItem("thunderagent-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage: the system's theme it is.
  }
})();
