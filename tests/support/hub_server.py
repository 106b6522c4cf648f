"""A stand-in of the Hugging Face Hub that speaks enough of its HTTP API for the real client, on 127.0.0.1.

Repositories, branches, commits, pull requests, LFS uploads and downloads, range requests, tokens, private
repositories, datasets to read; and faults on demand: a status instead of an answer, or a connection cut in the middle
of a body.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else git_oid(self.data)


@dataclass
class Repo:
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branch, or refs/pr/N -> commit
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, ref: str, tree: dict[str, File], **entry: Any) -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted((p, f.etag) for p, f in tree.items())}".encode()).hexdigest()
        self.commits[sha], self.refs[ref] = tree, sha
        self.log.append({"ref": ref, "sha": sha, **entry})
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def tree(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.refs[revision]]


@dataclass
class Fault:
    method: str
    path: re.Pattern[str]
    status: int | None = None
    cut_after: int | None = None  # bytes of the body, then the connection is closed
    times: int = 1


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **body: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


class Hub:
    """``with Hub() as hub: HfApi(endpoint=hub.url)``.

    Args:
        tokens: token -> organisations that it may write to.
    """

    def __init__(self, tokens: dict[str, set[str]] | None = None) -> None:
        self.tokens = {"writer": {"org"}, "reader": set()} if tokens is None else tokens
        self.repos: dict[str, Repo] = {}  # a dataset's name begins with "datasets/"
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._lock = threading.RLock()
        hub = self

        class Bound(Handler):
            pass

        Bound.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.storage = (
            f"http://127.0.0.1:{port}",
            f"http://localhost:{port}",
        )  # large files have another host

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def hold(self, name: str, files: dict[str, File], private: bool = False) -> Repo:
        """A repository that somebody has uploaded already."""
        repo = self.repos[name] = Repo(private=private)
        repo.commit("main", files, summary="upload")
        self.lfs |= {file.sha256: file.data for file in files.values() if file.lfs}
        return repo

    def fail(self, method: str, path: str, status: int, times: int = 1) -> None:
        self.faults.append(Fault(method, re.compile(path), status=status, times=times))

    def cut(self, method: str, path: str, after: int, times: int = 1) -> None:
        self.faults.append(Fault(method, re.compile(path), cut_after=after, times=times))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path.search(path):
                    fault.times -= 1
                    return fault
        return None

    def seen(self, method: str, path: str) -> list[dict[str, str]]:
        """The headers of the requests so far."""
        return [h for m, p, h in self.requests if m == method and re.search(path, p)]

    # ------------------------------------------------------------------------------------------------------------ API

    def user_of(self, headers: Any) -> str | None:
        given = headers.get("Authorization", "")
        token = given.removeprefix("Bearer ").strip()
        if given and token not in self.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return token or None

    def may_write(self, user: str, owner: str) -> bool:
        """A token's name is its user's, who has a namespace of that name."""
        return owner == user or owner in self.tokens[user]

    def repo(self, name: str, user: str | None) -> Repo:
        found = self.repos.get(name)
        owner = name.removeprefix("datasets/").split("/")[0]
        hidden = found is not None and found.private and (user is None or not self.may_write(user, owner))
        if found is None or hidden:
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def writable(self, name: str, user: str | None, *, pull_request: bool = False) -> Repo:
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        repo = self.repo(name, user)
        if not self.may_write(user, name.split("/")[0]) and not pull_request:
            raise Refusal(403, "Forbidden: you do not have write access to this repository")
        return repo

    def create(self, body: dict[str, Any], user: str | None) -> dict[str, Any]:
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        organisation = body.get("organization") or user
        name = f"{organisation}/{body['name']}"
        if not self.may_write(user, organisation):
            raise Refusal(403, "You don't have the rights to create a model under this namespace")
        if name in self.repos:
            raise Refusal(409, "You already created this model repo", url=f"{self.url}/{name}")
        repo = self.repos[name] = Repo(private=body.get("visibility") == "private" or bool(body.get("private")))
        repo.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n")}, summary="initial commit")
        return {"url": f"{self.url}/{name}", "name": name}

    def branch(self, name: str, branch: str, body: dict[str, Any], user: str | None) -> dict[str, Any]:
        repo = self.writable(name, user)
        if branch in repo.refs:
            raise Refusal(409, f"Reference already exists: refs/heads/{branch}")
        repo.refs[branch] = self.sha(repo, body.get("startingPoint") or "main")
        return {}

    def sha(self, repo: Repo, revision: str) -> str:
        found = repo.resolve(revision)
        if found is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def info(self, name: str, revision: str, user: str | None) -> dict[str, Any]:
        repo = self.repo(name, user)
        sha = self.sha(repo, revision)
        tree = repo.commits[sha]
        card = tree["README.md"].data.decode() if "README.md" in tree else ""
        data = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else None
        siblings = [{"rfilename": path} for path in sorted(tree)]
        name = name.removeprefix("datasets/")
        return {"id": name, "sha": sha, "siblings": siblings, "private": repo.private, "cardData": data, "tags": []}

    def list_tree(
        self, name: str, revision: str, user: str | None, folder: str = "", *, recursive: bool = False
    ) -> list[dict[str, Any]]:
        """Files and folders directly in ``folder``, or all files below it."""
        prefix = f"{folder}/" if folder else ""
        names = {prefix + path.removeprefix(prefix).split("/")[0] for path in self.all_of(name, revision, user)
                 if path.startswith(prefix)}  # fmt: skip
        if folder and not names:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        if recursive:
            names = {path for path in self.all_of(name, revision, user) if path.startswith(prefix)}
        return self.paths_info(name, revision, sorted(names), user)

    def all_of(self, name: str, revision: str, user: str | None) -> dict[str, File]:
        repo = self.repo(name, user)
        return repo.commits[self.sha(repo, revision)]

    def paths_info(self, name: str, revision: str, paths: list[str], user: str | None) -> list[dict[str, Any]]:
        tree, entries = self.all_of(name, revision, user), []
        folders = {str(parent) for path in tree for parent in PurePosixPath(path).parents}
        for path in paths:
            if path in folders:
                entries.append({"type": "directory", "oid": git_oid(path.encode()), "path": path, "size": 0})
            if path not in tree:
                continue
            file = tree[path]
            entry: dict[str, Any] = {"type": "file", "oid": git_oid(file.data), "size": len(file.data), "path": path}
            if file.lfs:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def preupload(self, name: str, revision: str, body: dict[str, Any], user: str | None, pr: bool) -> dict[str, Any]:
        repo = self.writable(name, user, pull_request=pr)
        tree = repo.commits[self.sha(repo, revision)]
        answers = []
        for file in body["files"]:
            lfs = file["path"].endswith((".safetensors", ".pth", ".png")) or file["size"] > 10 << 20
            old = tree.get(file["path"])
            oid = old.etag if old else None
            mode = "lfs" if lfs else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def lfs_batch(self, name: str, body: dict[str, Any], user: str | None) -> dict[str, Any]:
        self.repo(name, user)
        objects = []
        for item in body["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.lfs:
                verify = {"href": f"{self.url}/api/verify"}
                entry["actions"] = {"upload": {"href": f"{self.storage}/lfs/{item['oid']}"}, "verify": verify}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def commit(self, name: str, revision: str, lines: list[dict[str, Any]], user: str | None, pr: bool) -> Any:
        repo = self.writable(name, user, pull_request=pr)
        parent = self.sha(repo, revision)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, parent):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(repo.commits[parent])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.lfs:
                    raise Refusal(400, f"LFS object {value['oid']} was not uploaded")
                tree[value["path"]] = File(self.lfs[value["oid"]], lfs=True)
            elif line["key"] == "deletedFile" and tree.pop(value["path"], None) is None:
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        ref = f"refs/pr/{number}" if pr else revision
        sha = repo.commit(ref, tree, summary=header["summary"], description=header.get("description", ""))
        answer = {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}
        return answer | ({"pullRequestUrl": f"{self.url}/{name}/discussions/{number}"} if pr else {})


class Handler(BaseHTTPRequestHandler):
    """Routes requests to the `Hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        hub.requests.append((self.command, path, dict(self.headers)))
        body = self.body()
        fault = hub.take_fault(self.command, path)
        try:
            if fault is not None and fault.status is not None:
                raise Refusal(fault.status, f"stand-in refuses with {fault.status}")
            self.route(path, query, body, fault)
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code} if refusal.code else {}
            headers["X-Error-Message"] = refusal.message
            self.send_json({"error": refusal.message, **refusal.body}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def route(self, path: str, query: dict[str, list[str]], body: bytes, fault: Fault | None) -> None:
        hub, user = self.hub, self.hub.user_of(self.headers)
        pr = query.get("create_pr") == ["1"]
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        if path == "/api/repos/create":
            return self.send_json(hub.create(json.loads(body), user))
        if path == "/api/validate-yaml":
            return self.send_json({"errors": [], "warnings": []})
        if path == "/api/verify":
            known = json.loads(body)["oid"] in hub.lfs
            return self.send_json({}, 200 if known else 404)
        if match := re.fullmatch(r"/lfs/(\w+)", path):
            if self.command == "PUT":
                if hashlib.sha256(body).hexdigest() != match[1]:
                    raise Refusal(400, "the content does not have this oid")
                hub.lfs[match[1]] = body
                return self.send_json({})
            if match[1] not in hub.lfs:
                raise Refusal(404, "no such object")
            return self.send_bytes(hub.lfs[match[1]], {"ETag": f'"{match[1]}"'}, fault)
        if match := re.fullmatch(r"/api/models/(\w[^/]*/[^/]+)/(revision|tree|preupload|commit|branch)/(.+)", path):
            name, what, revision = match[1], match[2], match[3].rstrip("/")
            if what == "revision":
                return self.send_json(hub.info(name, revision, user))
            if what == "tree":
                revision, folder = re.fullmatch(r"(refs/pr/\d+|[^/]+)/?(.*)", revision).groups()
                return self.send_json(hub.list_tree(name, revision, user, folder, recursive=recursive))
            if what == "preupload":
                return self.send_json(hub.preupload(name, revision, json.loads(body), user, pr))
            if what == "branch":
                return self.send_json(hub.branch(name, revision, json.loads(body or b"{}"), user))
            lines = [json.loads(line) for line in body.splitlines()]
            return self.send_json(hub.commit(name, revision, lines, user, pr))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self.send_json(hub.info(match[1], "main", user))
        if match := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path):
            name, what, revision, folder = match[1], match[2], match[3] or "main", match[4] or ""
            if what == "tree":
                return self.send_json(hub.list_tree(name, revision, user, folder, recursive=recursive))
            if what == "paths-info":
                return self.send_json(hub.paths_info(name, revision, parse_qs(body.decode())["paths"], user))
            return self.send_json(hub.info(name, revision, user))
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.send_json(hub.lfs_batch(match[1], json.loads(body), user))
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            return self.send_file(match[1], match[2], match[3], user, fault)
        raise Refusal(404, f"the stand-in has no {self.command} {path}")

    def send_file(self, name: str, revision: str, path: str, user: str | None, fault: Fault | None) -> None:
        repo = self.hub.repo(name, user)
        sha = self.hub.sha(repo, revision)
        file = repo.commits[sha].get(path)
        if file is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.etag}"'}
        if not file.lfs:
            return self.send_bytes(file.data, headers, fault)
        linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
        location = {"Location": f"{self.hub.storage}/lfs/{file.sha256}"}
        return self.send_json({}, 302, headers | linked | location)

    def send_bytes(self, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        status, total = 200, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or total), total - 1)
            status, data = 206, data[start : end + 1]
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{total}"}
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data)), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut_after is not None:
            self.wfile.write(data[: fault.cut_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(data)

    def send_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
