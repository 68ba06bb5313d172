//! Response cache (lm-eval's `--use_cache`): JSON lines, one file per rank, so that an interrupted evaluation can
//! resume.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file};
use serde::{Deserialize, Serialize};

use crate::request::{Request, Response};

/// Response cache file of one rank.
pub struct ResponseCache {
    path: PathBuf,
    file: File,
    /// Lines not yet written.
    lines: Vec<u8>,
}

/// One line: key of the request, and response.
#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    #[serde(flatten)]
    answer: ResponseJson,
}

/// A response as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum ResponseJson {
    Loglikelihood { logprob: f64, is_greedy: bool },
    Rolling { loglikelihood: f64 },
    Text { text: String },
}

/// Returns the key of a request to model `identity`. `draw` is the seed and index of a sampled response; `None` for
/// deterministic ones.
pub fn key(identity: &str, request: &Request, max_gen_toks: usize, draw: Option<(u64, usize)>) -> blake3::Hash {
    let request = match request {
        Request::Loglikelihood { context, continuation } => {
            serde_json::json!(["loglikelihood", context, continuation])
        }
        Request::LoglikelihoodRolling { text } => serde_json::json!(["loglikelihood_rolling", text]),
        Request::GenerateUntil { context, settings } => {
            let n_max = settings.max_gen_toks.unwrap_or(max_gen_toks);
            let sampling = settings.do_sample.then_some((settings.temperature, settings.top_p, settings.top_k, draw));
            serde_json::json!(["generate_until", context, settings.until, n_max, sampling])
        }
    };
    blake3::hash(format!("{identity}\n{request}").as_bytes())
}

impl ResponseCache {
    /// Opens this rank's file for model `identity`, for appending. An incomplete last line is truncated.
    pub fn open(folder: &Path, identity: &str, rank: usize) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
        let path = folder.join(format!("{}.{rank}.jsonl", short(identity)));
        let open = || {
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Ok(None),
                // Some file systems do not support locks.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            let n_whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
            file.set_len(n_whole as u64)?;
            file.seek(SeekFrom::End(0))?;
            Ok::<_, io::Error>(Some(file))
        };
        match open().with_context(|| format!("failed to open {}", path.display()))? {
            Some(file) => Ok(Self { path, file, lines: Vec::new() }),
            None => bail!(
                "failed to open {}: another evaluation of this model writes to it; wait for it, or name another output \
                 folder",
                path.display()
            ),
        }
    }

    /// Adds a response; [`ResponseCache::write`] writes it to the file.
    pub fn add(&mut self, key: &str, response: &Response) -> Result<()> {
        let line = Line { key: key.to_owned(), answer: ResponseJson::from(response) };
        serde_json::to_writer(&mut self.lines, &line)?;
        self.lines.push(b'\n');
        Ok(())
    }

    /// Writes the added responses to the file.
    pub fn write(&mut self) -> Result<()> {
        let written = self.file.write_all(&self.lines).and_then(|()| self.file.flush());
        written.with_context(|| format!("failed to write answers to {}", self.path.display()))?;
        self.lines.clear();
        Ok(())
    }
}

/// Returns the cached responses of model `identity` by key, from all ranks' files.
pub fn read(folder: &Path, identity: &str) -> Result<HashMap<String, Response>> {
    let mut known = HashMap::new();
    if !folder.is_dir() {
        return Ok(known);
    }
    let list = || -> io::Result<Vec<PathBuf>> { fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect() };
    for path in list().with_context(|| format!("failed to list {}", folder.display()))? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(&format!("{}.", short(identity))) && name.ends_with(".jsonl") {
            read_file(&path, &mut known)?;
        }
    }
    Ok(known)
}

fn read_file(path: &Path, known: &mut HashMap<String, Response>) -> Result<()> {
    let bytes = read_regular_file(path, MAX_GENERATED_FILE_BYTES)
        .with_context(|| format!("failed to read {}", path.display()))?;
    // An interrupted evaluation leaves an incomplete last line.
    let n_whole = bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    for (i, line) in bytes[..n_whole].split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
        let Line { key, answer } = serde_json::from_slice(line).map_err(|error| {
            anyhow!(
                "failed to read line {} of {} as an answer: {error}; delete the line, or the file to answer all anew",
                i + 1,
                path.display()
            )
        })?;
        known.insert(key, answer.into());
    }
    Ok(())
}

/// Returns the first characters of the identity, for file names.
fn short(identity: &str) -> &str {
    identity.get(..16).unwrap_or(identity)
}

impl From<&Response> for ResponseJson {
    fn from(response: &Response) -> Self {
        match response {
            Response::Loglikelihood { logprob, is_greedy } => {
                Self::Loglikelihood { logprob: *logprob, is_greedy: *is_greedy }
            }
            Response::LoglikelihoodRolling(loglikelihood) => Self::Rolling { loglikelihood: *loglikelihood },
            Response::Text(text) => Self::Text { text: text.clone() },
        }
    }
}

impl From<ResponseJson> for Response {
    fn from(answer: ResponseJson) -> Self {
        match answer {
            ResponseJson::Loglikelihood { logprob, is_greedy } => Self::Loglikelihood { logprob, is_greedy },
            ResponseJson::Rolling { loglikelihood } => Self::LoglikelihoodRolling(loglikelihood),
            ResponseJson::Text { text } => Self::Text(text),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::request::GenerationSettings;

    const MODEL: &str = "0123456789abcdef-one";

    fn responses() -> [Response; 3] {
        [
            Response::Loglikelihood { logprob: -0.1 - 1e-17, is_greedy: true },
            Response::LoglikelihoodRolling(-0.123_456_789_012_345_67),
            Response::Text("a\n\u{1f600}\"".into()),
        ]
    }

    #[test]
    fn responses_of_every_rank_are_read_back_after_any_exit() {
        let folder = tempfile::tempdir().unwrap();
        for (rank, response) in responses().iter().enumerate() {
            let mut log = ResponseCache::open(folder.path(), MODEL, rank).unwrap();
            log.add(&format!("key {rank}"), response).unwrap();
            log.write().unwrap();
        }
        let torn = folder.path().join("0123456789abcdef.1.jsonl");
        OpenOptions::new().append(true).open(&torn).unwrap().write_all(b"{\"key\": \"ab").unwrap();
        let check = |n: usize| {
            let known = read(folder.path(), MODEL).unwrap();
            assert_eq!(known.len(), n);
            responses().iter().enumerate().for_each(|(i, want)| assert_eq!(known[&format!("key {i}")], *want));
        };
        check(3);
        let mut log = ResponseCache::open(folder.path(), MODEL, 1).unwrap();
        log.add("key 3", &responses()[0]).unwrap();
        log.write().unwrap();
        check(4);
        assert!(read(folder.path(), "another model's").unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_written_to_or_broken_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = ResponseCache::open(folder.path(), MODEL, 0).unwrap();
        let error = ResponseCache::open(folder.path(), MODEL, 0).err().unwrap();
        assert!(error.to_string().contains("another evaluation of this model writes to it"));
        log.lines = b"{\"key\": 5}\n{}\n".to_vec();
        log.write().unwrap();
        let error = read(folder.path(), MODEL).unwrap_err().to_string();
        assert!(error.contains("line 1 of") && error.contains("delete the line"), "{error}");
    }

    #[test]
    fn a_key_depends_on_the_model_and_the_whole_request() {
        let settings = GenerationSettings {
            until: vec!["x".into()],
            max_gen_toks: None,
            do_sample: false,
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
        };
        let generate =
            |settings: &GenerationSettings| Request::GenerateUntil { context: "a".into(), settings: settings.clone() };
        let scored = |context: &str, continuation: &str| Request::Loglikelihood {
            context: context.into(),
            continuation: continuation.into(),
        };
        let greedy = generate(&settings);
        let sampled = generate(&GenerationSettings { do_sample: true, temperature: 1.0, ..settings.clone() });
        let keys = [
            key("m", &scored("a", "b"), 256, None),
            key("n", &scored("a", "b"), 256, None),
            key("m", &scored("ab", ""), 256, None),
            key("m", &Request::LoglikelihoodRolling { text: "a".into() }, 256, None),
            key("m", &greedy, 256, None),
            key("m", &greedy, 255, None),
            key("m", &sampled, 256, Some((1, 0))),
            key("m", &sampled, 256, Some((1, 1))),
            key("m", &sampled, 256, Some((2, 0))),
        ];
        for (i, one) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(one), "{i}");
        }
        // A default that is written out is the same request.
        let written = generate(&GenerationSettings { max_gen_toks: Some(256), ..settings });
        assert_eq!(key("m", &written, 1, Some((3, 3))), keys[4]);
    }
}
