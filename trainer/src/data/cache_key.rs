//! Keys of the token cache. Their parts stay readable, so that a miss can name the changed ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::source::{RowSource, SourceError};
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate};
use candlewick_text::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::failpoint::failpoint;

/// The version of the rendering. It is raised when the same rows give other tokens.
const RENDERING: &str = "5";

/// The number of rows in a hashed chunk.
const ROWS: usize = 1024;

/// The files of a tokenizer's folder that its token ids depend on.
const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// The key of one source's tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheKey {
    /// The data set as written in the recipe. A miss is compared with entries of the same name only.
    pub(crate) name: String,
    parts: BTreeMap<String, String>,
}

impl CacheKey {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), parts: BTreeMap::new() }.with("rendering", RENDERING)
    }

    /// Adds a part. `part` is its name for the user: "the tokenizer", "sample_count".
    pub(crate) fn with(mut self, part: &str, value: impl Into<String>) -> Self {
        self.parts.insert(part.to_owned(), value.into());
        self
    }

    /// Returns the digest of the parts. The name is not part of it: equal rows have equal tokens.
    pub(crate) fn digest(&self) -> String {
        let mut hash = FieldHasher::default();
        for (part, value) in &self.parts {
            hash.add(part.as_bytes()).add(value.as_bytes());
        }
        hash.finish()
    }

    /// Returns the names of the parts that differ.
    pub(crate) fn changed_from(&self, other: &Self) -> Vec<String> {
        let names = self.parts.keys().chain(other.parts.keys());
        let mut changed: Vec<String> =
            names.filter(|part| self.parts.get(*part) != other.parts.get(*part)).cloned().collect();
        changed.sort();
        changed.dedup();
        changed
    }
}

/// SHA-256 over fields, each prefixed by its length.
#[derive(Default)]
pub(crate) struct FieldHasher(Sha256);

impl FieldHasher {
    pub(crate) fn add(&mut self, field: &[u8]) -> &mut Self {
        self.0.update((field.len() as u64).to_le_bytes());
        self.0.update(field);
        self
    }

    pub(crate) fn finish(self) -> String {
        self.0.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// Hashes the selected rows. Other rows of the file and its name do not matter. Returns `None` once `is_stopped`.
pub(crate) fn hash_rows(
    source: &dyn RowSource,
    chosen: &[u32],
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<Option<String>, SourceError> {
    let progress = WorkProgress::start("read", ProgressUnit::Count("rows"), chosen.len());
    let chunks: Result<Vec<String>, SourceError> = chosen
        .par_chunks(ROWS)
        .enumerate()
        .map(|(chunk_idx, chunk)| {
            failpoint("rows_read", chunk_idx);
            let mut hash = FieldHasher::default();
            let chunk = if is_stopped() { &chunk[..0] } else { chunk };
            for &row in chunk {
                let row = source.row(row as usize)?;
                hash.add(serde_json::Value::Object(row).to_string().as_bytes());
            }
            progress.add(chunk.len());
            Ok(hash.finish())
        })
        .collect();
    let mut hash = FieldHasher::default();
    for chunk in chunks? {
        hash.add(chunk.as_bytes());
    }
    Ok((!is_stopped()).then(|| hash.finish()))
}

/// Hashes the files that the token ids depend on.
pub(crate) fn hash_tokenizer(tokenizer: &Tokenizer) -> String {
    let mut hash = FieldHasher::default();
    for name in TOKENIZER_FILES {
        add_file(&mut hash, &tokenizer.directory().join(name));
    }
    hash.finish()
}

/// Hashes a template: its source and variables, and its output if it reads the clock.
pub(crate) fn hash_template(template: &ChatTemplate) -> String {
    let mut hash = FieldHasher::default();
    hash.add(template.fingerprint().as_bytes());
    if template.reads_clock() {
        let turns = [("system", "Be brief."), ("user", "Two?"), ("assistant", "2")];
        let chat = Conversation::new(turns.map(|(role, text)| Message::new(role, text)));
        let printed = template.render(&chat, AddGenerationPrompt::Yes);
        hash.add(printed.unwrap_or_else(|error| error.to_string()).as_bytes());
    }
    hash.finish()
}

/// Hashes a file. A missing file has a hash of its own.
fn add_file(hash: &mut FieldHasher, path: &Path) {
    match std::fs::read(path) {
        Ok(bytes) => hash.add(b"file").add(&bytes),
        Err(_) => hash.add(b"none"),
    };
}
