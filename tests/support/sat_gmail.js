// An IMAP server with IDLE and Gmail's X-GM-EXT-1, driven by lines of JSON on its standard input:
// {"raw": "a mail", "id": "its X-GM-MSGID"} is put into INBOX, and those who wait are told at once.
const [, , modules, port, storage, ...further] = process.argv;
const hoodiecrow = require(modules + "/hoodiecrow-imap");
const plugins = ["ID", "NAMESPACE", "LITERALPLUS", "UNSELECT", "X-GM-EXT-1", ...further];
const server = hoodiecrow({ plugins, storage: JSON.parse(storage) });
server.registerCapability("X-GM-EXT-1", (connection) => connection.state !== "Not Authenticated"); // the plug-in forgets
server.server.on("connection", (socket) => socket.setNoDelay(true)); // as mail servers do
server.server.listen(Number(port), "127.0.0.1", () => console.log(server.server.address().port));
if (further.includes("IDLE")) {
  const idle = server.getCommandHandler("IDLE");
  server.setCommandHandler("IDLE", (connection, ...rest) => { idle(connection, ...rest); console.log("idle"); });
}
require("readline").createInterface({ input: process.stdin })
  .on("line", (line) => {
    const mail = JSON.parse(line);
    server.appendMessage("INBOX", [], false, mail.raw).message["X-GM-MSGID"] = mail.id;
  })
  .on("close", () => process.exit(0));
