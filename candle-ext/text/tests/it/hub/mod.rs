//! Hub access, tested with a local server that fails on request.

mod datasets;
mod faults;
mod locks;
mod models;
mod server;
mod uploads;

use std::path::Path;
use std::time::Duration;

use candlewick_text::hub::{Hub, HubSettings};
use server::HubServer;
use tempfile::TempDir;

/// A local Hub server, a cache, and a client of both.
struct Bench {
    server: HubServer,
    cache: TempDir,
}

impl Bench {
    fn new(server: HubServer) -> Self {
        Self { server, cache: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> HubSettings {
        HubSettings {
            endpoint: self.server.endpoint(),
            backoff: Duration::from_millis(1),
            ..HubSettings::new(self.cache.path())
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings()).unwrap()
    }

    fn offline(&self) -> Hub {
        Hub::new(HubSettings { offline: true, ..self.settings() }).unwrap()
    }

    /// Returns the names of blobs and of partial downloads in the cache.
    fn blobs(&self) -> Vec<String> {
        let mut names = Vec::new();
        for repo in folders(self.cache.path()) {
            names.extend(folders(&repo.join("blobs")).iter().map(|p| name(p)));
        }
        names.sort();
        names
    }
}

fn folders(path: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|p| !name(p).starts_with('.')).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// Returns the sorted names of a folder's files.
fn names_in(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = folders(path).iter().map(|p| name(p)).collect();
    names.sort();
    names
}
