//! Renderings within a budget of time and memory.
//!
//! The engine counts instructions, but one instruction may double a list, join a million texts or drop a value nested a
//! million deep. So a rendering runs on a thread of its own with a large stack, and this thread watches it.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, Value};

use super::limits::LimitedOutput;
use crate::catch_panic::catch_panic;

/// The time between two looks at a rendering. Nearly all end before the first.
const TICK: Duration = Duration::from_millis(20);
/// Looks before a rendering is given up: 10 seconds in which this process runs.
const MAX_TICKS: u32 = 500;
/// Bytes by which the process may grow meanwhile.
const MAX_GROWTH: u64 = 512 << 20;
/// Looks before the growth counts: other threads grow the process, too, and a rendering within its means has ended by then.
const MIN_TICKS: u32 = 25;
/// Stacks to try, of address space alone. A level of a nested value takes 80 bytes and more, and its recursion less than 1 KiB
/// of stack: values that fit [`MAX_GROWTH`] fit the largest stack.
const STACKS: [usize; 4] = [8 << 30, 1 << 30, 128 << 20, 16 << 20];

/// A reason why there is no text.
#[derive(Debug)]
pub enum RenderFailure {
    /// The template or its data are wrong.
    Template(Error),
    /// The rendering was given up; its thread may go on until the process ends.
    LimitExceeded(String),
}

/// Renders a template of `environment` with the variables `context`.
pub fn render(
    environment: &Arc<Environment<'static>>,
    name: &'static str,
    context: Value,
) -> Result<String, RenderFailure> {
    let job = Job { environment: Arc::clone(environment), name, context };
    WORKER.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Worker::start().ok();
        }
        let Some(worker) = slot else { return job.run() };
        let result = worker.render(job);
        if matches!(result, Err(RenderFailure::LimitExceeded(_))) {
            *slot = None;
        }
        result
    })
}

thread_local! {
    static WORKER: RefCell<Option<Worker>> = const { RefCell::new(None) };
}

struct Job {
    environment: Arc<Environment<'static>>,
    name: &'static str,
    context: Value,
}

impl Job {
    fn run(self) -> Result<String, RenderFailure> {
        let mut output = LimitedOutput::default();
        let print = || {
            let template = self.environment.get_template(self.name)?;
            template.render_captured_to(self.context, &mut output).map(drop)
        };
        match catch_panic(print) {
            Ok(printed) => printed.map(|()| output.into_text()).map_err(RenderFailure::Template),
            Err(panic) => Err(RenderFailure::LimitExceeded(format!("the template engine gave up: {panic}"))),
        }
    }
}

/// A thread that renders for the thread that owns this.
struct Worker {
    jobs: Sender<Job>,
    results: Receiver<Result<String, RenderFailure>>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let mut started = Self::with_stack(STACKS[0]);
        for stack in &STACKS[1..] {
            started = started.or_else(|_| Self::with_stack(*stack));
        }
        started
    }

    fn with_stack(n_bytes: usize) -> io::Result<Self> {
        let ((jobs, next), (send, results)) = (channel::<Job>(), channel());
        let work = move || next.iter().map(Job::run).try_for_each(|result| send.send(result));
        thread::Builder::new().name("template".to_owned()).stack_size(n_bytes).spawn(work)?;
        Ok(Self { jobs, results })
    }

    fn render(&self, job: Job) -> Result<String, RenderFailure> {
        let gone = || RenderFailure::LimitExceeded("the template engine gave up".to_owned());
        self.jobs.send(job).map_err(|_| gone())?;
        let mut before = None;
        for tick in 0..MAX_TICKS {
            match self.results.recv_timeout(TICK) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = resident_bytes();
            let grown = now.unwrap_or(0).saturating_sub(*before.get_or_insert(now.unwrap_or(0)));
            if tick >= MIN_TICKS && grown > MAX_GROWTH {
                let most = MAX_GROWTH >> 20;
                return Err(RenderFailure::LimitExceeded(format!(
                    "one rendering takes more than {most} MiB of memory"
                )));
            }
        }
        let seconds = (TICK * MAX_TICKS).as_secs();
        Err(RenderFailure::LimitExceeded(format!("one rendering takes more than {seconds} seconds")))
    }
}

/// Returns the anonymous memory of this process in bytes, where the system reports it.
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}
