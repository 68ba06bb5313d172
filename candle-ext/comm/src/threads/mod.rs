//! Backend whose ranks are threads of one process, for tests and for runs on one node.

mod transport;

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crate::panic::panic_message;
use crate::{Options, Result, World};
pub(crate) use transport::{SharedWorld, solo_transport, transports};

/// Runs `rank` on `size` threads, each a rank of one world, and returns their results in rank order.
///
/// If a rank fails or panics, the world is aborted and the first failure is returned.
pub fn run<T: Send, E: Display>(
    size: usize,
    options: Options,
    rank: impl Fn(&World) -> Result<T, E> + Sync,
) -> Result<Vec<T>> {
    let world = SharedWorld::new(options.timeout);
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let rank = &rank;
        let spawn = |world: Result<World>| scope.spawn(move || run_rank(world?, rank));
        let threads: Vec<_> = worlds(&world, size, &options).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("the thread catches panics")).collect()
    });
    match world.failure() {
        Some(first) => Err(first.into()),
        None => results.into_iter().collect(),
    }
}

fn worlds(world: &Arc<SharedWorld>, size: usize, options: &Options) -> impl Iterator<Item = Result<World>> {
    let open = move |transport| {
        if size == 1 { Ok(World::single_rank(transport)) } else { World::open(transport, size, options) }
    };
    transports(world, size).map(open)
}

fn run_rank<T, E: Display>(world: World, rank: &impl Fn(&World) -> Result<T, E>) -> Result<T> {
    world.run(|world| match catch_unwind(AssertUnwindSafe(|| rank(world))) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("finish: it panicked: {}", panic_message(&*panic))),
    })
}
