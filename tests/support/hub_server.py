"""A stand-in for the Hugging Face Hub on 127.0.0.1: enough of its HTTP API for the real client.

It holds repositories of models and datasets with branches, commits, pull requests and large files (LFS), and checks
tokens. On demand it refuses a request with a status, or closes the connection in the middle of a body.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


def files_of(directory: Path) -> dict[str, File]:
    """The files of a directory by name, weights as large files."""
    return {path.name: File(path.read_bytes(), lfs=path.suffix == ".safetensors") for path in directory.iterdir()}


@dataclass
class Repo:
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branch, or refs/pr/N -> commit
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, ref: str, tree: dict[str, File], **entry: Any) -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted((p, f.etag) for p, f in tree.items())}".encode()).hexdigest()
        self.commits[sha], self.refs[ref] = tree, sha
        self.log.append(entry)
        return sha

    def tree(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.sha(revision)]

    def sha(self, revision: str) -> str:
        if revision not in self.refs and revision not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.refs.get(revision, revision)


@dataclass
class Fault:
    method: str
    path: str
    status: int | None = None
    times: int = 1
    cut_after: int | None = None  # bytes of the body


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **body: str) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **body}


class Hub:
    """``with Hub() as hub: HfApi(endpoint=hub.url)``."""

    def __init__(self) -> None:
        self.tokens = {"writer": {"writer", "org"}, "reader": {"reader"}}  # token -> namespaces that it may write to
        self.repos: dict[str, Repo] = {}  # a dataset's name begins with "datasets/"
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}"  # large files: another host

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def hold(self, name: str, files: dict[str, File], private: bool = False) -> Repo:
        """A repository with files that are there already."""
        repo = self.repos[name] = Repo(private=private)
        repo.commit("main", files, summary="upload")
        self.lfs |= {file.sha256: file.data for file in files.values() if file.lfs}
        return repo

    def fail(self, *fault: Any, **options: Any) -> None:
        """Let requests come upon a `Fault`."""
        self.faults.append(Fault(*fault, **options))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def seen(self, method: str, path: str) -> list[dict[str, str]]:
        """The headers of the requests so far."""
        return [h for m, p, h in self.requests if m == method and re.search(path, p)]

    # What the API answers. ``user`` is the token, which is also the name of its user.

    def repo(self, name: str, user: str | None) -> Repo:
        repository, owner = self.repos.get(name), name.removeprefix("datasets/").split("/")[0]
        if repository is None or (repository.private and owner not in self.tokens.get(user or "", ())):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repository

    def create(self, body: dict[str, Any], user: str | None) -> dict[str, Any]:
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        owner = body.get("organization") or user
        name = f"{owner}/{body['name']}"
        if owner not in self.tokens[user]:
            raise Refusal(403, "You don't have the rights to create a model under this namespace")
        if name in self.repos:
            raise Refusal(409, "You already created this model repo", url=f"{self.url}/{name}")
        private = body.get("visibility") == "private" or bool(body.get("private"))
        self.hold(name, {".gitattributes": File(b"*.safetensors filter=lfs\n")}, private)
        return {"url": f"{self.url}/{name}", "name": name}

    def info(self, name: str, revision: str, user: str | None) -> dict[str, Any]:
        repo = self.repo(name, user)
        sha, tree = repo.sha(revision), repo.tree(revision)
        card = tree["README.md"].data.decode() if "README.md" in tree else ""
        data = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else None
        siblings = [{"rfilename": path} for path in sorted(tree)]
        name = name.removeprefix("datasets/")
        return {"id": name, "sha": sha, "siblings": siblings, "private": repo.private, "cardData": data, "tags": []}

    def list_tree(self, tree: dict[str, File], folder: str, recursive: bool) -> list[dict[str, Any]]:
        """Files and folders directly in ``folder``, or all files below it."""
        prefix = f"{folder}/" if folder else ""
        below = [path for path in tree if path.startswith(prefix)]
        if folder and not below:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        return self.paths_info(
            tree, sorted(below if recursive else {prefix + path[len(prefix) :].split("/")[0] for path in below})
        )

    def paths_info(self, tree: dict[str, File], paths: list[str]) -> list[dict[str, Any]]:
        folders, entries = {str(parent) for path in tree for parent in PurePosixPath(path).parents}, []
        for path in paths:
            if path in folders:
                entries.append({"type": "directory", "oid": "0" * 40, "path": path, "size": 0})
            elif path in tree:
                file, size = tree[path], len(tree[path].data)
                large = {"lfs": {"oid": file.sha256, "size": size, "pointerSize": 130}} if file.lfs else {}
                entries.append({"type": "file", "oid": file.etag, "size": size, "path": path, **large})
        return entries

    def preupload(self, tree: dict[str, File], paths: list[str]) -> dict[str, Any]:
        modes = {path: "lfs" if path.endswith((".safetensors", ".png")) else "regular" for path in paths}
        oids = {path: tree[path].etag for path in paths if path in tree}
        return {
            "files": [{"path": p, "uploadMode": modes[p], "oid": oids.get(p), "shouldIgnore": False} for p in paths]
        }

    def lfs_batch(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        for entry in objects:
            if entry["oid"] not in self.lfs:
                entry["actions"] = {"upload": {"href": f"{self.storage}/lfs/{entry['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    def commit(self, name: str, revision: str, lines: list[dict[str, Any]], repo: Repo, pr: bool) -> dict[str, Any]:
        header, tree = lines[0]["value"], dict(repo.tree(revision))
        for kind, value in ((line["key"], line["value"]) for line in lines[1:]):
            if kind == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                tree[value["path"]] = File(self.lfs[value["oid"]], lfs=True)
            elif kind == "deletedFile" and tree.pop(value["path"], None) is None:
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        entry = {"summary": header["summary"], "description": header.get("description", "")}
        sha = repo.commit(f"refs/pr/{number}" if pr else revision, tree, **entry)
        answer = {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}
        return answer | ({"pullRequestUrl": f"{self.url}/{name}/discussions/{number}"} if pr else {})


class Handler(BaseHTTPRequestHandler):
    """Routes requests to the `Hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        self.hub.requests.append((self.command, path, dict(self.headers)))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fault = self.hub.take_fault(self.command, path)
        try:
            if self.fault is not None and self.fault.status is not None:
                raise Refusal(self.fault.status, f"stand-in refuses with {self.fault.status}")
            self.route(path, query, body)
        except Refusal as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            self.send(refusal.body, refusal.status, {**code, "X-Error-Message": str(refusal)})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def route(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        hub, given = self.hub, self.headers.get("Authorization", "")
        user = given.removeprefix("Bearer ").strip() or None
        if given and user not in hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if path == "/api/repos/create":
            return self.send(hub.create(json.loads(body), user))
        if path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/lfs/(\w+)", path):
            if self.command == "PUT":
                hub.lfs[match[1]] = body
            return self.send({} if self.command == "PUT" else hub.lfs[match[1]], headers={"ETag": f'"{match[1]}"'})
        ref = r"(refs/pr/\d+|[^/]+)"
        if match := re.fullmatch(rf"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/([\w-]+)/{ref}/?(.*))?", path):
            name, what, revision, folder = match[1], match[2], match[3] or "main", match[4] or ""
            return self.send(self.about(name, what, revision, folder, user, query, body))
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            hub.repo(match[1], user)
            return self.send(hub.lfs_batch(json.loads(body)["objects"]))
        if match := re.fullmatch(rf"/((?:datasets/)?[^/]+/[^/]+)/resolve/{ref}/(.+)", path):
            repo = hub.repo(match[1], user)
            file = repo.tree(match[2]).get(match[3])
            if file is None:
                raise Refusal(404, "Entry not found", "EntryNotFound")
            headers = {"X-Repo-Commit": repo.sha(match[2]), "ETag": f'"{file.etag}"'}
            if not file.lfs:
                return self.send(file.data, headers=headers)
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
            return self.send({}, 302, {**headers, "Location": f"{hub.storage}/lfs/{file.sha256}"})
        raise Refusal(404, f"the stand-in has no {self.command} {path}")

    def about(self, name: str, what: str, revision: str, folder: str, user: Any, query: Any, body: bytes) -> Any:
        """The answer about one repository."""
        hub = self.hub
        if what in (None, "revision"):
            return hub.info(name, revision, user)
        repo = hub.repo(name, user)
        if what == "branch":
            return {"ref": repo.refs.setdefault(revision, repo.sha("main"))}
        if what == "tree":
            recursive = query.get("recursive", [""])[0].lower() in ("true", "1")
            return hub.list_tree(repo.tree(revision), folder, recursive)
        if what == "paths-info":
            return hub.paths_info(repo.tree(revision), parse_qs(body.decode())["paths"])
        if what == "preupload":
            return hub.preupload(repo.tree(revision), [file["path"] for file in json.loads(body)["files"]])
        lines = [json.loads(line) for line in body.splitlines()]
        return hub.commit(name, revision, lines, repo, query.get("create_pr") == ["1"])

    def send(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send bytes, of which a range if it is asked for, or JSON."""
        headers, data = {**(headers or {})}, value
        if not isinstance(value, bytes):
            headers["Content-Type"], data = "application/json", json.dumps(value).encode()
        elif match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or len(value)), len(value) - 1)
            status, data = 206, value[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{len(value)}"
        self.send_response(status)
        for key, text in {**headers, "Content-Length": str(len(data)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.fault.cut_after if self.fault is not None else None
        self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
