// Sets the theme before the first paint: "light" or "dark" if the user chose one, else that of the system.
"use strict";
try {
  const chosen = localStorage.getItem("mnemos-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is blocked: the theme of the system stays.
}
