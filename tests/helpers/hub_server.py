"""A stand-in for the HTTP side of the Hugging Face hub: repositories in memory, on this machine.

It has what the hub's library asks for to make a repository, a branch and a commit, to list files
and to download them. Files are stored whole; nothing is large enough for another kind of storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

OWNER_TOKEN = "hf_" + "o" * 30
"""The token that may write, and read what is private."""


@dataclass
class Repository:
    """Files by commit, and the commits at which branches are."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch, files):
        """Make these the files of a branch, and return the name of the commit."""
        text = repr((len(self.commits), sorted(files.items())))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def files(self, revision="main"):
        """The files of a branch or of a commit."""
        return self.commits[self.branches.get(revision, revision)]


class HubServer(ThreadingHTTPServer):
    """The hub. Its address is `url`, what it was asked is in `requests`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.sizes: dict[str, int] = {}
        """Sizes that are reported for files, in place of their own."""
        self.is_down = False

    @property
    def url(self):
        """Address of the hub, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, name, files):
        """Make a repository with these files."""
        self.repositories[name] = Repository()
        self.repositories[name].commit("main", files)
        return self.repositories[name]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        words = [unquote(word) for word in urlsplit(self.path).path.strip("/").split("/")]
        self.server.requests.append(f"{self.command} {unquote(self.path)}")
        if self.server.is_down:
            self._send(503, {"error": "the hub is down"})
        elif words[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif words[:2] == ["api", "validate-yaml"]:
            self._send(200, {"errors": [], "warnings": []})
        elif words[:2] == ["api", "models"]:
            self._model("/".join(words[2:4]), words[4:], body)
        elif words[2:3] == ["resolve"]:
            self._resolve("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._send(404, {"error": "no such address"})

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815  # names of the base class

    def _send(self, status, content, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _is_owner(self):
        return self.headers.get("Authorization") == f"Bearer {OWNER_TOKEN}"

    def _create(self, wanted):
        if not self._is_owner:
            self._send(401, {"error": "Invalid username or password."})
            return
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repositories:
            self._send(409, {"error": "You already created this model repo", **url})
            return
        new = self.server.publish(name, {})
        new.private = wanted.get("visibility") == "private" or wanted.get("private", False)
        self._send(200, url)

    def _found(self, name, revision):
        """A repository that may be seen and has a revision; else the refusal is sent."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._is_owner):
            self._send(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        elif revision not in {*found.branches, *found.commits}:
            self._send(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        else:
            return found
        return None

    def _model(self, name, words, body):
        what, revision = [*words, *["revision", "main"][len(words) :]][:2]
        if what == "branch":
            branches = self.server.repositories[name].branches
            branches[revision] = branches["main"]
            self._send(200, {})
            return
        found = self._found(name, revision)
        if found is None:
            return
        files = found.files(revision)
        sizes = {path: self.server.sizes.get(path, len(data)) for path, data in files.items()}
        if what == "commit":
            self._send(200, self._commit(name, found, revision, body))
        elif what == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            self._send(200, {"files": [{"path": path, **kind} for path in asked]})
        elif what == "tree":
            listed = [{"type": "file", "path": path, "size": sizes[path]} for path in files]
            self._send(200, [{**entry, "oid": _oid(files[entry["path"]])} for entry in listed])
        else:
            siblings = [{"rfilename": path, "size": size} for path, size in sizes.items()]
            sha = found.branches.get(revision, revision)
            answer = {"id": name, "sha": sha, "private": found.private, "siblings": siblings}
            self._send(200, answer)

    def _commit(self, name, found, revision, body):
        files = dict(found.files(revision))
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.commit(revision, files)
        return {"commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"}

    def _resolve(self, name, revision, path):
        found = self._found(name, revision)
        if found is None:
            return
        data = found.files(revision).get(path)
        if data is None:
            self._send(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
            return
        commit = found.branches.get(revision, revision)
        self._send(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=commit)


def _oid(data):
    """Name of a file's content, as git has it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
