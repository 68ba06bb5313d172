//! Hub server on 127.0.0.1 with repositories in memory.
//!
//! It records every request, and rules make single responses fail. A second address serves large files, as in the
//! real Hub.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

pub(crate) struct HubServer {
    state: Arc<State>,
}

struct State {
    hub: SocketAddr,
    cdn: SocketAddr,
    repos: Mutex<Vec<Repo>>,
    rules: Mutex<Vec<Rule>>,
    log: Mutex<Vec<HubRequest>>,
    /// Files in LFS by SHA-256, and parts of them by SHA-256 and number.
    lfs: Mutex<BTreeMap<String, Vec<u8>>>,
    parts: Mutex<BTreeMap<(String, usize), Vec<u8>>>,
    part_size: Option<usize>,
    closing: AtomicBool,
}

/// A repository and how it is served.
#[derive(Clone)]
pub(crate) struct Repo {
    path: String,
    commit: String,
    files: Vec<(String, Vec<u8>)>,
    page_size: usize,
    token: Option<String>,
    moved_to: Option<String>,
    is_private: bool,
}

/// Recorded request.
#[derive(Clone, Debug)]
pub(crate) struct HubRequest {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) at_cdn: bool,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

/// Response.
#[derive(Clone, Default)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of body bytes after which the connection is closed.
    cut_at: Option<usize>,
    /// True to send no response until the client disconnects.
    is_silent: bool,
    /// True to send the body slowly, byte by byte.
    drips: bool,
}

struct Rule {
    method: &'static str,
    part: String,
    n_left: usize,
    reply: Reply,
}

pub(crate) const FOREVER: usize = usize::MAX;

impl Repo {
    /// `models/owner/name` or `datasets/owner/name`.
    pub(crate) fn new(path: &str, files: &[(&str, &str)]) -> Self {
        let mut repo = Self {
            path: path.to_owned(),
            commit: String::new(),
            files: Vec::new(),
            page_size: 1000,
            token: None,
            moved_to: None,
            is_private: false,
        };
        for (path, text) in files {
            repo = repo.with(path, text.as_bytes());
        }
        repo
    }

    pub(crate) fn with(mut self, path: &str, bytes: &[u8]) -> Self {
        self.files.retain(|(own, _)| own != path);
        self.files.push((path.to_owned(), bytes.to_owned()));
        let all: Vec<u8> = self.files.iter().flat_map(|(p, b)| [p.as_bytes(), b].concat()).collect();
        self.commit = hash(&all)[..40].to_owned();
        self
    }

    pub(crate) fn in_pages_of(self, page_size: usize) -> Self {
        Self { page_size, ..self }
    }

    pub(crate) fn gated_by(self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self }
    }

    pub(crate) fn moved_to(self, id: &str) -> Self {
        Self { moved_to: Some(id.to_owned()), ..self }
    }

    pub(crate) fn commit(&self) -> &str {
        &self.commit
    }

    pub(crate) fn is_private(&self) -> bool {
        self.is_private
    }

    pub(crate) fn file(&self, path: &str) -> Option<&[u8]> {
        self.files.iter().find(|(own, _)| own == path).map(|(_, bytes)| bytes.as_slice())
    }
}

impl Reply {
    pub(crate) fn new(status: u16, body: &str) -> Self {
        Self { status, body: body.as_bytes().to_owned(), ..Self::default() }
    }

    pub(crate) fn silence() -> Self {
        Self { is_silent: true, ..Self::default() }
    }

    pub(crate) fn drip(self) -> Self {
        Self { drips: true, ..self }
    }

    pub(crate) fn header(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub(crate) fn cut_at(self, n_bytes: usize) -> Self {
        Self { cut_at: Some(n_bytes), ..self }
    }
}

impl HubRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

impl HubServer {
    pub(crate) fn start(repos: impl IntoIterator<Item = Repo>) -> Self {
        Self::start_with(repos, None)
    }

    /// Starts a server that takes files of LFS in chunks of this size.
    pub(crate) fn start_with(repos: impl IntoIterator<Item = Repo>, part_size: Option<usize>) -> Self {
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let cdn = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = Arc::new(State {
            hub: hub.local_addr().unwrap(),
            cdn: cdn.local_addr().unwrap(),
            repos: Mutex::new(repos.into_iter().collect()),
            rules: Mutex::default(),
            log: Mutex::default(),
            lfs: Mutex::default(),
            parts: Mutex::default(),
            part_size,
            closing: AtomicBool::new(false),
        });
        for listener in [hub, cdn] {
            let state = state.clone();
            std::thread::spawn(move || state.serve(&listener));
        }
        Self { state }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.state.hub)
    }

    /// Sends `reply` to the next `n_times` requests of `method` whose target contains `part`.
    pub(crate) fn answer(&self, method: &'static str, part: &str, n_times: usize, reply: Reply) {
        let rule = Rule { method, part: part.to_owned(), n_left: n_times, reply };
        self.state.rules.lock().unwrap().push(rule);
    }

    pub(crate) fn replace(&self, repo: Repo) {
        let mut repos = self.state.repos.lock().unwrap();
        repos.retain(|own| own.path != repo.path);
        repos.push(repo);
    }

    /// Returns the repository `models/owner/name`, if it exists.
    pub(crate) fn repo(&self, path: &str) -> Option<Repo> {
        self.state.repos.lock().unwrap().iter().find(|repo| repo.path == path).cloned()
    }

    pub(crate) fn log(&self) -> Vec<HubRequest> {
        self.state.log.lock().unwrap().clone()
    }

    /// Returns the number of requests of `method` whose target contains `part`.
    pub(crate) fn count(&self, method: &str, part: &str) -> usize {
        self.log().iter().filter(|r| r.method == method && r.target.contains(part)).count()
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::SeqCst);
        for address in [self.state.hub, self.state.cdn] {
            let _ = TcpStream::connect(address);
        }
    }
}

impl State {
    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let (state, at_cdn) = (self.clone(), listener.local_addr().unwrap() == self.cdn);
            std::thread::spawn(move || state.talk(stream, at_cdn));
        }
    }

    fn talk(&self, stream: TcpStream, at_cdn: bool) {
        let Some(request) = read_request(&stream, at_cdn) else { return };
        self.log.lock().unwrap().push(request.clone());
        let reply = self.scripted(&request).unwrap_or_else(|| self.reply(&request));
        let _ = match reply.is_silent {
            true => (&stream).read(&mut [0]).map(|_| ()),
            false => write_reply(stream, &request.method, &reply),
        };
    }

    fn scripted(&self, request: &HubRequest) -> Option<Reply> {
        let mut rules = self.rules.lock().unwrap();
        let rule = rules
            .iter_mut()
            .find(|rule| rule.n_left > 0 && rule.method == request.method && request.target.contains(&rule.part))?;
        if rule.n_left != FOREVER {
            rule.n_left -= 1;
        }
        Some(rule.reply.clone())
    }

    fn reply(&self, request: &HubRequest) -> Reply {
        if request.method == "POST" || request.method == "PUT" {
            return self.upload(request).unwrap_or_else(|| Reply::new(404, "{\"error\":\"Repository not found\"}"));
        }
        let repos = self.repos.lock().unwrap().clone();
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        for repo in &repos {
            let id = repo.path.trim_start_matches("models/");
            let api = format!("/api/{}/", repo.path);
            let resolve = format!("/{id}/resolve/{}/", repo.commit);
            let is_allowed = || match &repo.token {
                Some(token) => request.header("authorization") == Some(&format!("Bearer {token}")),
                None => true,
            };
            if let Some(rest) = path.strip_prefix(&api) {
                return match is_allowed() {
                    true => self.api(repo, rest, query),
                    false => gated(repo),
                };
            }
            if let Some(file) = path.strip_prefix(&resolve) {
                return match &repo.moved_to {
                    _ if !request.at_cdn && !is_allowed() => gated(repo),
                    Some(to) => {
                        let there = format!("/{to}/resolve/{}/{file}", repo.commit);
                        Reply::new(307, "").header("Location", there)
                    }
                    None => self.file(repo, file, request),
                };
            }
        }
        Reply::new(404, "{\"error\":\"Repository not found\"}").header("X-Error-Code", "RepoNotFound")
    }

    /// Answers a request of an upload; `None` if it names nothing that exists.
    fn upload(&self, request: &HubRequest) -> Option<Reply> {
        let body: Json = serde_json::from_slice(&request.body).unwrap_or(Json::Null);
        let target = request.target.as_str();
        if let Some(rest) = target.strip_prefix("/lfs/") {
            return self.store(rest, request, &body);
        }
        // A write needs a token.
        if request.header("authorization").is_none() {
            return Some(Reply::new(401, "{\"error\":\"Invalid username or password.\"}"));
        }
        if target == "/api/repos/create" {
            return Some(self.create(&body));
        }
        let id = target.trim_start_matches("/api/models/").trim_start_matches('/');
        let id = ["/preupload/", "/commit/", ".git/info/lfs/"].iter().find_map(|end| Some(id.split_once(end)?.0))?;
        let path = format!("models/{id}");
        let mut repos = self.repos.lock().unwrap();
        let repo = repos.iter_mut().find(|repo| repo.path == path)?;
        if target.contains("/preupload/") {
            let mode = |file: &Json| {
                let path = file["path"].as_str().unwrap();
                json!({"path": path, "uploadMode": if is_large(path) { "lfs" } else { "regular" }})
            };
            let files: Vec<Json> = body["files"].as_array()?.iter().map(mode).collect();
            return Some(Reply::new(200, &json!({ "files": files }).to_string()));
        }
        if target.ends_with("/lfs/objects/batch") {
            let objects: Vec<Json> = body["objects"].as_array()?.iter().map(|object| self.place(object)).collect();
            return Some(Reply::new(200, &json!({"transfer": "basic", "objects": objects}).to_string()));
        }
        for line in String::from_utf8_lossy(&request.body).lines() {
            let line: Json = serde_json::from_str(line).unwrap();
            let value = &line["value"];
            let bytes = match line["key"].as_str().unwrap() {
                "file" => BASE64.decode(value["content"].as_str().unwrap()).unwrap(),
                "lfsFile" => self.lfs.lock().unwrap().get(value["oid"].as_str().unwrap())?.clone(),
                _ => continue,
            };
            *repo = repo.clone().with(value["path"].as_str().unwrap(), &bytes);
        }
        Some(Reply::new(200, &json!({"commitOid": repo.commit}).to_string()))
    }

    fn create(&self, body: &Json) -> Reply {
        let path = format!("models/{}/{}", body["organization"].as_str().unwrap(), body["name"].as_str().unwrap());
        let mut repos = self.repos.lock().unwrap();
        if repos.iter().any(|repo| repo.path == path) {
            return Reply::new(409, "{\"error\":\"You already created this model repo\"}");
        }
        repos.push(Repo { is_private: body["private"] == true, ..Repo::new(&path, &[]) });
        Reply::new(200, "{\"url\":\"x\"}")
    }

    /// Returns the addresses of a file of LFS: none if it is there already.
    fn place(&self, object: &Json) -> Json {
        let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
        if self.lfs.lock().unwrap().contains_key(oid) {
            return object.clone();
        }
        let at = |kind: &str| format!("http://{}/lfs/{kind}/{oid}", self.cdn);
        let upload = match self.part_size {
            None => json!({"href": at("whole")}),
            Some(part_size) => {
                let mut header = json!({"chunk_size": part_size.to_string()});
                (1..=size.div_ceil(part_size))
                    .for_each(|i| header[i.to_string()] = json!(format!("{}/{i}", at("part"))));
                json!({"href": at("complete"), "header": header})
            }
        };
        json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": {"href": at("verify")}}})
    }

    /// Stores a file or a part of one, or checks it.
    fn store(&self, rest: &str, request: &HubRequest, body: &Json) -> Option<Reply> {
        assert!(request.header("authorization").is_none(), "the token goes to the Hub alone");
        let mut words = rest.split('/');
        let (kind, oid) = (words.next()?, words.next()?.to_owned());
        match kind {
            "part" => {
                let number: usize = words.next()?.parse().ok()?;
                let etag = format!("\"{}\"", hash(&request.body));
                self.parts.lock().unwrap().insert((oid, number), request.body.clone());
                return Some(Reply::new(200, "").header("ETag", etag));
            }
            "whole" => drop(self.lfs.lock().unwrap().insert(oid, request.body.clone())),
            "complete" => {
                let parts = self.parts.lock().unwrap();
                let listed = body["parts"].as_array()?.iter().map(|part| part["partNumber"].as_u64().unwrap() as usize);
                let bytes: Vec<u8> = listed.flat_map(|number| parts[&(oid.clone(), number)].clone()).collect();
                self.lfs.lock().unwrap().insert(oid, bytes);
            }
            _ => {
                let found = self.lfs.lock().unwrap().get(&oid).is_some_and(|bytes| hash(bytes) == oid);
                return Some(Reply::new(if found { 200 } else { 422 }, ""));
            }
        }
        Some(Reply::new(200, ""))
    }

    fn api(&self, repo: &Repo, rest: &str, query: &str) -> Reply {
        if let Some(revision) = rest.strip_prefix("revision/") {
            return match revision == "main" || revision == repo.commit {
                true => Reply::new(200, &format!("{{\"id\":\"x\",\"sha\":\"{}\"}}", repo.commit)),
                false => Reply::new(404, "{\"error\":\"Invalid rev id\"}").header("X-Error-Code", "RevisionNotFound"),
            };
        }
        let start: usize = query.split("cursor=").nth(1).map_or(0, |cursor| cursor.parse().unwrap());
        let page = repo.files.iter().skip(start).take(repo.page_size).map(|(path, bytes)| {
            let mut entry = json!({"type": "file", "oid": &hash(bytes)[..40], "size": bytes.len(), "path": path});
            if is_large(path) {
                entry["lfs"] = json!({"oid": hash(bytes), "size": bytes.len(), "pointerSize": 130});
            }
            entry
        });
        let reply = Reply::new(200, &serde_json::Value::from_iter(page).to_string());
        match start + repo.page_size < repo.files.len() {
            false => reply,
            true => {
                let path = format!("/api/{}/tree/{}", repo.path, repo.commit);
                let next = format!("http://{}{path}?cursor={}", self.hub, start + repo.page_size);
                reply.header("Link", format!("<{next}>; rel=\"next\""))
            }
        }
    }

    fn file(&self, repo: &Repo, path: &str, request: &HubRequest) -> Reply {
        let path = path.replace("%20", " ");
        let Some((path, bytes)) = repo.files.iter().find(|(own, _)| *own == path) else {
            return Reply::new(404, "").header("X-Error-Code", "EntryNotFound");
        };
        let etag = etag(path, bytes);
        if request.header("if-none-match") == Some(&format!("\"{etag}\"")) {
            return Reply::new(304, "");
        }
        if is_large(path) && !request.at_cdn {
            return Reply::new(302, "Found")
                .header("Location", format!("http://{}{}", self.cdn, request.target))
                .header("X-Repo-Commit", &repo.commit)
                .header("X-Linked-Etag", format!("\"{etag}\""))
                .header("X-Linked-Size", bytes.len());
        }
        let reply = Reply { status: 200, body: bytes.clone(), ..Reply::default() };
        let reply = match request.at_cdn {
            true => reply.header("ETag", "\"of-the-cdn\""),
            false => reply.header("ETag", format!("\"{etag}\"")).header("X-Repo-Commit", &repo.commit),
        };
        from_range(reply, request)
    }
}

/// Returns the SHA-256 of a large file, or a text of a git hash's length for a small one.
pub(crate) fn etag(path: &str, bytes: &[u8]) -> String {
    let hash = hash(bytes);
    if is_large(path) { hash } else { hash[..40].to_owned() }
}

fn is_large(path: &str) -> bool {
    [".safetensors", ".parquet", ".gguf"].iter().any(|end| path.ends_with(end))
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn gated(repo: &Repo) -> Reply {
    let message = format!("Access to {} is restricted", repo.path);
    Reply::new(401, "").header("X-Error-Code", "GatedRepo").header("X-Error-Message", message)
}

fn from_range(mut reply: Reply, request: &HubRequest) -> Reply {
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes="));
    if let Some(start) = range.and_then(|range| range.trim_end_matches('-').parse::<usize>().ok()) {
        reply.status = 206;
        reply.body = reply.body.split_off(start);
    }
    reply
}

fn read_request(stream: &TcpStream, at_cdn: bool) -> Option<HubRequest> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim().split_once(": ") {
            Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
            None => break,
        }
    }
    let mut request = HubRequest { method, target, at_cdn, headers, body: Vec::new() };
    let n_bytes = request.header("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    reader.take(n_bytes).read_to_end(&mut request.body).ok()?;
    Some(request)
}

fn write_reply(mut stream: TcpStream, method: &str, reply: &Reply) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status)?;
    if reply.status != 304 {
        write!(stream, "Content-Length: {}\r\n", reply.body.len())?;
    }
    for (name, value) in &reply.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if method != "HEAD" && reply.drips {
        return drip(&stream, &reply.body);
    }
    if method != "HEAD" {
        stream.write_all(&reply.body[..reply.cut_at.unwrap_or(reply.body.len())])?;
    }
    stream.flush()
}

/// Sends the body byte by byte until the client hangs up, and looks for that between two bytes.
fn drip(mut stream: &TcpStream, body: &[u8]) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_millis(5)))?;
    for byte in body.chunks(1) {
        stream.write_all(byte)?;
        if matches!(stream.read(&mut [0]), Ok(0)) {
            break;
        }
    }
    Ok(())
}
