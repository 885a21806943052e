// Rules of ESLint that the format of Prettier cannot show: names that nothing declares, imports or uses.

const globals = require("globals");

const rules = {
  "no-undef": "error",
  "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
  "no-redeclare": "error",
  "no-shadow-restricted-names": "error",
  "no-import-assign": "error",
  "no-const-assign": "error",
  "no-unreachable": "error",
  "no-dupe-keys": "error",
  "prefer-const": "error",
};

module.exports = [
  {
    files: ["**/*.{js,mjs}"],
    linterOptions: { reportUnusedDisableDirectives: "error" },
    languageOptions: {
      ecmaVersion: "latest",
      sourceType: "module",
      globals: { ...globals.browser, ...globals.worker },
    },
    rules,
  },
];
