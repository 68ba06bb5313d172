//! `trainer cache`: lists and removes entries of the caches: tokens, shipped recipes' data, GEMM algorithms.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow};
use candlewick_runtime::cores::cache_folder;
use candlewick_text::hub::HubSettings;
use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::Ui;
use super::disk_usage::{bytes_of, last_used};
use crate::data::{CacheEntryUse, default_cache_dir, describe_cache_entry, remove_cache_entry};
use crate::estimate::format_bytes;
use crate::exit::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer cache ls
  trainer cache ls --dir runs/cache
  trainer cache rm tokens/train.jsonl-6f3a9c0de1b2a485
  trainer cache rm --older-than 30d
  trainer cache rm --all --dry-run
Entries are made again when a run needs them. XDG_CACHE_HOME moves the folder. Tokens in use are not removed.
`hf cache` removes models and data sets of the Hub.";

#[derive(Debug, Subcommand)]
pub(super) enum CacheCommand {
    /// List the entries: size, last use, name, source; and the models and data sets of the Hub
    Ls {
        #[command(flatten)]
        folder: TokenFolder,
    },
    /// Remove entries
    Rm(RmArgs),
}

#[derive(Debug, Args)]
pub(super) struct TokenFolder {
    /// Folder of the token cache, such as a recipe's data.cache_dir [default: that of all recipes without the key]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("selection").required(true).multiple(false).args(["names", "older_than", "all"]))]
pub(super) struct RmArgs {
    /// Names of entries, as `trainer cache ls` prints them
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Entries without a use for this time: 12h, 30d or 4w
    #[arg(long, value_name = "TIME", value_parser = time)]
    older_than: Option<Duration>,
    /// All entries
    #[arg(long)]
    all: bool,
    /// Only list the entries
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    folder: TokenFolder,
}

/// An entry of a cache.
struct CacheEntry {
    /// The kind and the file name: `tokens/NAME`.
    name: String,
    path: PathBuf,
    bytes: u64,
    last_used: Option<SystemTime>,
    source: String,
}

pub(super) fn run(command: &CacheCommand, ui: &Ui) -> Result<ExitCode> {
    match command {
        CacheCommand::Ls { folder } => list(folder, ui),
        CacheCommand::Rm(args) => remove(args, ui),
    }
}

fn list(folder: &TokenFolder, ui: &Ui) -> Result<ExitCode> {
    let own = entries(folder);
    print_entries(&own, ui)?;
    let hub = HubSettings::from_env().cache;
    let repositories: Vec<CacheEntry> = entries_in(&hub, "hub").filter(|it| is_repository(&it.name)).collect();
    if !repositories.is_empty() {
        ui.print(&format!("\n{} (`hf cache` removes these):", hub.display()))?;
        print_entries(&repositories, ui)?;
    }
    Ok(ExitCode::Ok)
}

fn print_entries(entries: &[CacheEntry], ui: &Ui) -> Result<ExitCode> {
    for CacheEntry { name, bytes, last_used, source, .. } in entries {
        let day = last_used.and_then(|used| Timestamp::try_from(used).ok());
        let day = day.map(|used| used.strftime("%Y-%m-%d").to_string()).unwrap_or_default();
        ui.print(format!("{:>10}  {day:10}  {name}  {source}", format_bytes(*bytes)).trim_end())?;
    }
    let total = format_bytes(entries.iter().map(|entry| entry.bytes).sum());
    ui.print(&format!("{total:>10}  in all"))
}

fn is_repository(name: &str) -> bool {
    ["hub/models--", "hub/datasets--", "hub/spaces--"].iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the entries of the token cache. Without `--dir`, adds those of the other caches.
fn entries(folder: &TokenFolder) -> Vec<CacheEntry> {
    let tokens = folder.dir.clone().unwrap_or_else(default_cache_dir);
    let tokens = entries_in(&tokens, "tokens").filter_map(|entry| {
        let source = describe_cache_entry(&entry.path)?;
        Some(CacheEntry { source, ..entry })
    });
    let others = |kind: &'static str, source: &'static str| {
        let entries = entries_in(&cache_folder().join(kind), kind).filter(|_| folder.dir.is_none());
        entries.map(move |entry| CacheEntry { source: source.to_owned(), ..entry })
    };
    let recipes = others("recipes", "data of shipped recipes");
    let mut entries: Vec<CacheEntry> = tokens.chain(recipes).chain(others("gemm", "algorithms of cuBLASLt")).collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    entries
}

fn entries_in<'k>(folder: &Path, kind: &'k str) -> impl Iterator<Item = CacheEntry> + use<'k> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.map(move |path| {
        let name = format!("{kind}/{}", path.file_name().unwrap_or_default().to_string_lossy());
        CacheEntry { name, bytes: bytes_of(&path), last_used: last_used(&path), source: String::new(), path }
    })
}

fn remove(args: &RmArgs, ui: &Ui) -> Result<ExitCode> {
    let entries = entries(&args.folder);
    if let Some(unknown) = args.names.iter().find(|name| !entries.iter().any(|entry| entry.is_named(name))) {
        let problem = format!("failed to find the cache entry {unknown}; `trainer cache ls` lists them");
        return Err(anyhow!(problem).context(ExitCode::Usage));
    }
    let mut n_bytes = 0;
    for entry in entries.iter().filter(|entry| entry.is_selected(args)) {
        let removed = match args.dry_run {
            true => CacheEntryUse::Unused,
            false => {
                remove_cache_entry(&entry.path).with_context(|| format!("failed to remove {}", entry.path.display()))?
            }
        };
        let done = match (removed, args.dry_run) {
            (CacheEntryUse::InUse, _) => "kept, in use:",
            (CacheEntryUse::Unused, true) => "would remove",
            (CacheEntryUse::Unused, false) => "removed",
        };
        n_bytes += if removed == CacheEntryUse::Unused { entry.bytes } else { 0 };
        ui.print(&format!("{:>10}  {done} {}", format_bytes(entry.bytes), entry.name))?;
    }
    let done = if args.dry_run { "in all; without --dry-run they are removed" } else { "removed in all" };
    ui.print(&format!("{:>10}  {done}", format_bytes(n_bytes)))
}

impl CacheEntry {
    fn is_named(&self, name: &str) -> bool {
        self.name == name || self.name.split_once('/').is_some_and(|(_, own)| own == name)
    }

    fn is_selected(&self, args: &RmArgs) -> bool {
        let age = self.last_used.and_then(|used| used.elapsed().ok()).unwrap_or_default();
        args.all || args.names.iter().any(|name| self.is_named(name)) || args.older_than.is_some_and(|time| age > time)
    }
}

/// Parses a time such as `30d`.
fn time(text: &str) -> Result<Duration, String> {
    let units = [("h", 3600), ("d", 24 * 3600), ("w", 7 * 24 * 3600)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*seconds)
    });
    parsed.map(Duration::from_secs).ok_or_else(|| "expected hours, days or weeks, such as 12h, 30d or 4w".to_owned())
}
