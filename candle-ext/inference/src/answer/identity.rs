//! Identity of a model: a hash of its files, which keys the response cache.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candlewick_model::FP8_SCALES;
use candlewick_text::files::open_regular_file;
use rayon::prelude::*;

/// Files of a model folder that influence responses, besides the weights.
const SMALL: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    FP8_SCALES,
];

/// Returns a hash of weights, tokenizers and chat templates of `folders`, and of `settings`. It does not depend on the
/// folders' paths.
pub fn identity<'f>(folders: impl IntoIterator<Item = &'f Path>, settings: &str) -> Result<String> {
    let mut hash = blake3::Hasher::new();
    for folder in folders {
        let files = files(folder).with_context(|| format!("failed to list {}", folder.display()))?;
        let hashed: Vec<Result<String>> = files.par_iter().map(|file| hash_of(file)).collect();
        for (file, hashed) in files.iter().zip(hashed) {
            let name = file.strip_prefix(folder).unwrap_or(file);
            hash.update(format!("{}\n{}\n", name.display(), hashed?).as_bytes());
        }
        hash.update(b"\n");
    }
    Ok(hash.update(settings.as_bytes()).finalize().to_string())
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = SMALL.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect();
    files.extend(with_extension(folder, "safetensors")?);
    let templates = folder.join("additional_chat_templates");
    if templates.is_dir() {
        files.extend(with_extension(&templates, "jinja")?);
    }
    Ok(files)
}

fn with_extension(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn hash_of(path: &Path) -> Result<String> {
    let read = || -> io::Result<String> {
        let mut file = BufReader::with_capacity(1 << 20, open_regular_file(path)?);
        let mut hash = blake3::Hasher::new();
        loop {
            let piece = file.fill_buf()?;
            if piece.is_empty() {
                return Ok(hash.finalize().to_string());
            }
            let n = piece.len();
            hash.update(piece);
            file.consume(n);
        }
    };
    read().with_context(|| format!("failed to read {}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_changes_with_what_decides_an_answer_and_with_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("a"), folder.path().join("b"));
        for path in [&one, &other] {
            fs::create_dir_all(path.join("additional_chat_templates")).unwrap();
            fs::write(path.join("config.json"), "{}").unwrap();
            fs::write(path.join("model.safetensors"), "weights").unwrap();
        }
        let of = |folder: &Path, settings: &str| identity([folder], settings).unwrap();
        assert_eq!(of(&one, "f32"), of(&other, "f32"));
        assert_ne!(of(&one, "f32"), of(&one, "bf16"));
        fs::write(other.join("notes.txt"), "mine").unwrap();
        assert_eq!(of(&one, "f32"), of(&other, "f32"));
        for file in ["model.safetensors", "tokenizer.json", "additional_chat_templates/x.jinja"] {
            let before = of(&other, "f32");
            fs::write(other.join(file), "changed").unwrap();
            assert_ne!(of(&other, "f32"), before, "{file}");
        }
        assert_ne!(identity([&*one, &*other], "f32").unwrap(), identity([&*other, &*one], "f32").unwrap());
    }
}
