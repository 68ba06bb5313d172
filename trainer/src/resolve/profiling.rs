//! `mem_profiler` and `deepspeed.wall_clock_breakdown`.

use std::path::PathBuf;

use super::deepspeed;
use super::output::run_folder;
use super::resolver::Resolver;
use crate::plan::{MemoryProfilePlan, ProfilingPlan};
use crate::recipe::Origin;

const PROFILER: &str = "mem_profiler";
const DIR: &str = "mem_profiler_dir";
const MAX_ENTRIES: &str = "mem_profiler_max_entries";
const DEFAULT_MAX_ENTRIES: usize = 100_000;

pub(super) fn resolve(resolver: &mut Resolver) -> ProfilingPlan {
    ProfilingPlan { wall_clock_breakdown: deepspeed::wall_clock_breakdown(resolver), memory: memory(resolver) }
}

fn memory(resolver: &mut Resolver) -> Option<MemoryProfilePlan> {
    let recipe = resolver.recipe();
    let Some(mode) = recipe.mem_profiler else {
        for key in [DIR, MAX_ENTRIES].into_iter().filter(|key| resolver.loaded.is_set(key)) {
            resolver.note(format!("{key} has no effect without {PROFILER}"));
        }
        return None;
    };
    resolver.pick(PROFILER, Some(mode), mode);
    let max_entries = resolver.positive(MAX_ENTRIES, recipe.mem_profiler_max_entries, DEFAULT_MAX_ENTRIES);
    let dir = match (&recipe.mem_profiler_dir, run_folder(resolver)) {
        (Some(dir), _) => PathBuf::from(resolver.pick(DIR, Some(dir.clone()), String::new())),
        (None, Some(folder)) => resolver.record(DIR, folder.join("mem-prof"), Origin::Derived),
        (None, None) => {
            let message = format!("{PROFILER}: output_dir is /dev/null, so there is no folder for the profile");
            resolver.report_with_advice(&[PROFILER], message, format!("set {DIR}"));
            return None;
        }
    };
    Some(MemoryProfilePlan { mode, dir, max_entries })
}
