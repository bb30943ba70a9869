"""Local HTTP server with the API of the Hugging Face hub; repositories are kept in memory.

It implements the requests of the hub's library for creating repositories, branches and commits,
and for listing and downloading files. Files are stored whole; there is no large-file storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

OWNER_TOKEN = "hf_" + "o" * 30
"""Token with write access and read access to private repositories."""


@dataclass
class Repository:
    """Files by commit, and the latest commit of each branch."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Set the files of a branch; return the name of the commit."""
        text = repr((len(self.commits), sorted(files.items())))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch or a commit."""
        return self.commits[self.branches.get(revision, revision)]


class HubServer(ThreadingHTTPServer):
    """The hub server. Its address is `url`; `requests` lists the requests it received."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.sizes: dict[str, int] = {}
        """Reported file sizes that replace the actual ones."""
        self.is_down = False

    @property
    def url(self) -> str:
        """Address of the hub, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, name: str, files: dict[str, bytes]) -> Repository:
        """Create a repository with these files."""
        self.repositories[name] = Repository()
        self.repositories[name].commit("main", files)
        return self.repositories[name]

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def _answer(self) -> None:
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

    def _send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {OWNER_TOKEN}"

    def _create(self, wanted: dict[str, Any]) -> None:
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

    def _found(self, name: str, revision: str) -> Repository | None:
        """Return a repository if it is visible and has the revision; else send an error."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._is_owner):
            self._send(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        elif revision not in {*found.branches, *found.commits}:
            self._send(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        else:
            return found
        return None

    def _model(self, name: str, words: list[str], body: bytes) -> None:
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

    def _commit(self, name: str, found: Repository, revision: str, body: bytes) -> Any:
        files = dict(found.files(revision))
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.commit(revision, files)
        return {"commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"}

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        data = found.files(revision).get(path)
        if data is None:
            self._send(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
            return
        commit = found.branches.get(revision, revision)
        self._send(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=commit)


def _oid(data: bytes) -> str:
    """Return the git object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
