//! Upload of a folder to a model repository, as one commit.
//!
//! The Hub decides which files are stored in git and which in LFS. LFS files are sent to the storage that it names, whole or
//! in chunks; the commit then refers to them by their SHA-256. hf-hub 1.0 uploads LFS files through Xet alone, and sends them
//! inside of the commit if the server offers another transfer.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use reqwest::Method;
use reqwest::header::ETAG;
use serde_json::{Value as Json, json};

use super::retry::{AttemptError, ErrorResponse};
use super::upload_client::{
    Authorization, JSON, LFS_JSON, LocalFile, NEWLINE_JSON, RequestError, UploadBody, UploadClient, UploadRequest,
    read_part,
};
use super::verified_files::sha256_of;
use super::{DownloadCallback, DownloadProgress, Hub, HubError, HubSettings, RepoId};

/// Folder to upload.
#[derive(Clone, Copy, Debug)]
pub struct FolderUpload<'a> {
    /// Model repository; it is created if it does not exist.
    pub repo: &'a RepoId,
    /// Folder whose files are uploaded. Names that begin with a dot are left out.
    pub folder: &'a Path,
    /// Visibility of a new repository. An existing one keeps its own.
    pub visibility: RepoVisibility,
    /// First line of the commit message.
    pub message: &'a str,
}

/// Visibility of a new repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoVisibility {
    /// Its owner only.
    Private,
    /// Everybody.
    Public,
}

/// Bytes at the beginning of a file by which the Hub decides about LFS.
const SAMPLE_BYTES: u64 = 512;

impl Hub {
    /// Uploads a folder in one commit and returns the address of the repository.
    ///
    /// # Errors
    /// If there is no token, the token may not write, or the Hub cannot be reached. The local files stay as they are.
    pub fn upload(&self, upload: &FolderUpload, on_progress: Option<DownloadCallback>) -> Result<String, HubError> {
        let refuse = |problem: &str| HubError::Upload { id: upload.repo.to_string(), problem: problem.to_owned() };
        if self.settings().offline {
            return Err(refuse("HF_HUB_OFFLINE is set; unset it"));
        }
        if self.settings().token.is_none() {
            return Err(refuse("there is no token; set HF_TOKEN to a token with write access"));
        }
        let files = files_in(upload.folder).map_err(|error| refuse(&error.to_string()))?;
        let client = UploadClient::new(self.settings()).map_err(|problem| refuse(&problem))?;
        let uploader = Uploader { settings: self.settings(), client, upload, on_progress };
        uploader.run(files)
    }
}

/// SHA-256 of a file that is stored in LFS.
struct LfsFile<'a> {
    file: &'a LocalFile,
    sha256: String,
}

struct Uploader<'a> {
    settings: &'a HubSettings,
    client: UploadClient<'a>,
    upload: &'a FolderUpload<'a>,
    on_progress: Option<DownloadCallback>,
}

impl Uploader<'_> {
    fn run(&self, files: Vec<LocalFile>) -> Result<String, HubError> {
        self.create_repo()?;
        let is_lfs = self.preupload(&files)?;
        let (lfs, regular): (Vec<_>, Vec<_>) = files.iter().zip(is_lfs).partition(|(_, is_lfs)| *is_lfs);
        let lfs = lfs.into_iter().map(|(file, _)| self.hashed(file)).collect::<Result<Vec<_>, _>>()?;
        self.send_lfs(&lfs)?;
        self.commit(&lfs, regular.into_iter().map(|(file, _)| file))?;
        Ok(self.settings.redact(&format!("{}/{}", self.settings.endpoint, self.upload.repo.web_path())))
    }

    /// Creates the repository. An existing one is kept: the Hub answers 409.
    fn create_repo(&self) -> Result<(), HubError> {
        let (owner, name) = self.upload.repo.owner_and_name();
        let private = self.upload.visibility == RepoVisibility::Private;
        let mut body = json!({"type": "model", "name": name, "private": private});
        if !owner.is_empty() {
            body["organization"] = json!(owner);
        }
        match self.client.post("/api/repos/create", JSON, body.to_string()) {
            Err((AttemptError::Status(refusal), _)) if refusal.status == 409 => Ok(()),
            other => other.map(drop).map_err(|failure| self.failed(failure)),
        }
    }

    /// Returns for each file whether the Hub wants it in LFS.
    fn preupload(&self, files: &[LocalFile]) -> Result<Vec<bool>, HubError> {
        let described = files.iter().map(|file| {
            let sample = read_part(file, 0, SAMPLE_BYTES.min(file.size)).map_err(|error| self.io(file, &error))?;
            Ok(json!({"path": file.path, "size": file.size, "sample": BASE64.encode(sample)}))
        });
        let body = json!({"files": described.collect::<Result<Vec<_>, HubError>>()?});
        let path = format!("/api/models/{}/preupload/main", self.upload.repo);
        let answer = self.client.post(&path, JSON, body.to_string()).map_err(|failure| self.failed(failure))?;
        let modes = answer["files"].as_array().cloned().unwrap_or_default();
        let mode = |file: &LocalFile| {
            let found = modes.iter().find(|mode| mode["path"] == file.path.as_str());
            match found.and_then(|mode| mode["uploadMode"].as_str()) {
                Some("lfs") => Ok(file.size > 0),
                Some("regular") => Ok(false),
                other => Err(self.refused(&format!("the Hub answers {other:?} for {}, not lfs or regular", file.path))),
            }
        };
        files.iter().map(mode).collect()
    }

    fn hashed<'f>(&self, file: &'f LocalFile) -> Result<LfsFile<'f>, HubError> {
        Ok(LfsFile { file, sha256: sha256_of(&file.local).map_err(|error| self.io(file, &error))? })
    }

    /// Sends the files that the storage does not have yet.
    fn send_lfs(&self, files: &[LfsFile]) -> Result<(), HubError> {
        if files.is_empty() {
            return Ok(());
        }
        let objects = files.iter().map(|LfsFile { file, sha256 }| json!({"oid": sha256, "size": file.size}));
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects.collect::<Vec<_>>(),
            "hash_algo": "sha256", "ref": {"name": "main"},
        });
        let path = format!("/{}.git/info/lfs/objects/batch", self.upload.repo);
        let answer = self.client.post(&path, LFS_JSON, body.to_string()).map_err(|failure| self.failed(failure))?;
        for file in files {
            let object =
                answer["objects"].as_array().into_iter().flatten().find(|it| it["oid"] == file.sha256.as_str());
            let object = object.ok_or_else(|| self.refused(&format!("the Hub has no place for {}", file.file.path)))?;
            if let Some(message) = object["error"]["message"].as_str() {
                return Err(self.refused(&format!("the Hub refuses {}: {message}", file.file.path)));
            }
            // An object without actions is there already.
            if let Some(actions) = object.get("actions").filter(|actions| actions.is_object()) {
                self.send_object(file, actions)?;
            }
            self.report(file.file, file.file.size);
        }
        Ok(())
    }

    fn send_object(&self, file: &LfsFile, actions: &Json) -> Result<(), HubError> {
        let upload = &actions["upload"];
        let href = upload["href"].as_str().ok_or_else(|| self.refused("the Hub names no address for a file"))?;
        let part_size = upload["header"]["chunk_size"].as_str().and_then(|text| text.parse::<u64>().ok());
        match part_size.or(upload["header"]["chunk_size"].as_u64()).filter(|size| *size > 0) {
            Some(part_size) => self.send_parts(file, href, &upload["header"], part_size)?,
            None => {
                let body = UploadBody::Part { file: file.file, start: 0, len: file.file.size };
                let headers = texts(&upload["header"]);
                let headers = headers.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
                let request = UploadRequest { method: Method::PUT, url: href.to_owned(), headers, body };
                self.client.send(&request, Authorization::None).map_err(|failure| self.failed(failure))?;
            }
        }
        let Some(verify) = actions["verify"]["href"].as_str() else { return Ok(()) };
        let body = json!({"oid": file.sha256, "size": file.file.size}).to_string();
        self.client.post(verify, LFS_JSON, body).map(drop).map_err(|failure| self.failed(failure))
    }

    /// Sends a file in chunks to the addresses in `header`: "1", "2" and so on. Then reports their ETags to `href`.
    fn send_parts(&self, file: &LfsFile, href: &str, header: &Json, part_size: u64) -> Result<(), HubError> {
        let mut parts = Vec::new();
        for (part_idx, start) in (0..file.file.size).step_by(part_size as usize).enumerate() {
            let number = part_idx + 1;
            let url = texts(header).into_iter().find(|(name, _)| name.parse() == Ok(number));
            let url =
                url.ok_or_else(|| self.refused(&format!("the Hub names no address for part {number} of a file")))?.1;
            let body = UploadBody::Part { file: file.file, start, len: part_size.min(file.file.size - start) };
            let request = UploadRequest { method: Method::PUT, url, headers: Vec::new(), body };
            let answer = self.client.send(&request, Authorization::None).map_err(|failure| self.failed(failure))?;
            let etag = answer.headers.get(ETAG).and_then(|etag| etag.to_str().ok());
            let etag = etag.ok_or_else(|| self.refused("the storage answers without an ETag"))?;
            parts.push(json!({"partNumber": number, "etag": etag}));
            self.report(file.file, start);
        }
        let body = json!({"oid": file.sha256, "parts": parts}).to_string();
        self.client.post(href, LFS_JSON, body).map(drop).map_err(|failure| self.failed(failure))
    }

    /// Commits all files: small ones inside of the request, LFS files by hash.
    fn commit<'f>(&self, lfs: &[LfsFile], regular: impl Iterator<Item = &'f LocalFile>) -> Result<(), HubError> {
        let mut lines = vec![json!({"key": "header", "value": {"summary": self.upload.message, "description": ""}})];
        for file in regular {
            let bytes = read_part(file, 0, file.size).map_err(|error| self.io(file, &error))?;
            let value = json!({"path": file.path, "content": BASE64.encode(bytes), "encoding": "base64"});
            lines.push(json!({"key": "file", "value": value}));
        }
        for LfsFile { file, sha256 } in lfs {
            let value = json!({"path": file.path, "algo": "sha256", "oid": sha256, "size": file.size});
            lines.push(json!({"key": "lfsFile", "value": value}));
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = format!("/api/models/{}/commit/main", self.upload.repo);
        self.client.post(&path, NEWLINE_JSON, body).map(drop).map_err(|failure| self.failed(failure))
    }

    fn report(&self, file: &LocalFile, done: u64) {
        if let Some(on_progress) = &self.on_progress {
            on_progress(DownloadProgress { file: &file.path, done, total: file.size });
        }
    }

    fn io(&self, file: &LocalFile, error: &std::io::Error) -> HubError {
        self.refused(&format!("cannot read {}: {error}", file.local.display()))
    }

    fn refused(&self, problem: &str) -> HubError {
        HubError::Upload { id: self.upload.repo.to_string(), problem: self.settings.redact(problem) }
    }

    fn failed(&self, (failure, n_tries): RequestError) -> HubError {
        let problem = match failure {
            AttemptError::Hub(error) => return error,
            AttemptError::NoResponse(reason) | AttemptError::Interrupted(reason) => {
                format!("{} does not answer ({reason}); check the network, or HF_ENDPOINT", self.settings.endpoint)
            }
            AttemptError::TooSlow(problem) | AttemptError::InvalidResponse(problem) => problem,
            AttemptError::Status(ErrorResponse { status, message, url, .. }) => {
                let advice = match status {
                    401 => "; HF_TOKEN is not accepted: check that it is complete and not expired",
                    403 => "; this token may not write there: give it write access to the repository's owner",
                    429 => "; try again later",
                    _ => "",
                };
                let said = if message.is_empty() { String::new() } else { format!(": {message}") };
                let tries = if n_tries > 1 { format!(" after {n_tries} tries") } else { String::new() };
                format!("{} answers {status}{tries}{said}{advice}", url.split('?').next().unwrap_or_default())
            }
        };
        self.refused(&problem)
    }
}

/// Returns the entries of an object whose values are texts.
fn texts(object: &Json) -> Vec<(String, String)> {
    let text = |(name, value): (&String, &Json)| Some((name.clone(), value.as_str()?.to_owned()));
    object.as_object().into_iter().flatten().filter_map(text).collect()
}

/// Lists the files of a folder by name, without those that begin with a dot. Subfolders are not followed.
fn files_in(folder: &Path) -> std::io::Result<Vec<LocalFile>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let (local, name) = (entry.as_ref().map_or_else(|_| PathBuf::new(), |entry| entry.path()), entry?.file_name());
        let path = name.to_string_lossy().into_owned();
        let found = std::fs::metadata(&local)?;
        if found.is_file() && !path.starts_with('.') {
            files.push(LocalFile { path, local, size: found.len() });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}
