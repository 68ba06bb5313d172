//! Hostile contents of the Hub cache: links, pipes and files of other bytes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::table::{Attack, pipe, write};

const CACHED: &[&str] = &["evaluator", "score", "--model", "tiny/base", "--text", "Say yes."];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        name: "a locked file with other bytes in the cache",
        path: "recipe.yaml.lock",
        apply: |path| write_locked_cache(path),
        command: &["trainer", "train", "recipe.yaml", "model.name_or_path=tiny/base"],
        code: 3,
        words: &["recipe.yaml.lock", "its sha256 is ", "expected 0000", "run `trainer prefetch recipe.yaml`"],
    },
    Attack {
        name: "a locked file with other bytes in the cache, for check",
        path: "recipe.yaml.lock",
        apply: |path| write_locked_cache(path),
        command: &["trainer", "check", "recipe.yaml", "model.name_or_path=tiny/base"],
        code: 3,
        words: &["recipe.yaml.lock", "its sha256 is ", "expected 0000", "run `trainer prefetch recipe.yaml`"],
    },
    Attack {
        name: "a cached file that is a link to itself",
        path: "model",
        apply: |model| replace_config(model, |config| symlink("config.json", config).unwrap()),
        command: CACHED,
        code: 3,
        words: &["tiny/base", "config.json is not in the cache"],
    },
    Attack {
        name: "a cached file that is a dangling link",
        path: "model",
        apply: |model| replace_config(model, |config| symlink("/nowhere", config).unwrap()),
        command: CACHED,
        code: 3,
        words: &["tiny/base", "config.json is not in the cache"],
    },
    Attack {
        name: "a cached file that is a link to a device without an end",
        path: "model",
        apply: |model| replace_config(model, |config| symlink("/dev/zero", config).unwrap()),
        command: CACHED,
        code: 6,
        words: &["config.json", "no regular file"],
    },
    Attack {
        name: "a cached file that is a pipe",
        path: "model",
        apply: |model| replace_config(model, pipe),
        command: CACHED,
        code: 6,
        words: &["config.json", "no regular file"],
    },
    Attack {
        name: "a cached revision that is a link to a device without an end",
        path: "model",
        apply: |model| replace_revision(model, |revision| symlink("/dev/zero", revision).unwrap()),
        command: CACHED,
        code: 3,
        words: &["tiny/base", "no files of revision \"main\""],
    },
    Attack {
        name: "a cached revision that leads to another folder",
        path: "model",
        apply: |model| replace_revision(model, |revision| write(revision, "../../../models--tiny--base")),
        command: CACHED,
        code: 3,
        words: &["tiny/base", "no files of revision \"main\""],
    },
];

fn commit() -> String {
    "1".repeat(40)
}

/// Copies the model of `folder` into the Hub cache, and returns the folder of its files there.
fn write_cache(folder: &Path) -> PathBuf {
    let cache = folder.parent().unwrap().join(".cache/huggingface/hub/models--tiny--base");
    let snapshot = cache.join("snapshots").join(commit());
    let _ = fs::remove_dir_all(&cache);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), commit()).unwrap();
    for entry in fs::read_dir(folder.join("model")).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
    snapshot
}

/// Replaces config.json in the cache.
fn replace_config(model: &Path, replace: fn(&Path)) {
    let config = write_cache(model.parent().unwrap()).join("config.json");
    fs::remove_file(&config).unwrap();
    replace(&config);
}

/// Replaces the file with the commit of `main` in the cache.
fn replace_revision(model: &Path, replace: fn(&Path)) {
    let snapshot = write_cache(model.parent().unwrap());
    let revision = snapshot.ancestors().nth(2).unwrap().join("refs/main");
    fs::remove_file(&revision).unwrap();
    replace(&revision);
}

/// Copies the model into the Hub cache, and writes a lock file with other hashes.
fn write_locked_cache(lock: &Path) {
    let snapshot = write_cache(lock.parent().unwrap());
    let file = |entry: fs::DirEntry| {
        let (name, size) = (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len());
        json!({"path": name, "size": size, "sha256": "0".repeat(64)})
    };
    let files: Vec<_> = fs::read_dir(snapshot).unwrap().map(Result::unwrap).map(file).collect();
    let repository =
        json!({"type": "model", "id": "tiny/base", "revision": "main", "commit": commit(), "files": files});
    write(lock, json!({"version": 1, "endpoint": "http://hub", "repositories": [repository]}).to_string());
}
