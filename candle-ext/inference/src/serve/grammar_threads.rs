//! Compilation of grammars on threads of their own, with a deadline.
//!
//! llguidance recurses through a schema, so the threads have large stacks. A thread cannot be stopped. After its deadline it
//! gives its permit to the next grammar, unless too many threads are late already.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use axum::http::StatusCode;
use candlewick_text::tokenizer::Tokenizer;
use llguidance::api::TopLevelGrammar;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use super::api_error::ApiError;
use super::log_thread::{LogThread, RequestLogLine};
use crate::constraint::{GrammarCompiler, TokenConstraint};

/// Threads that compile the grammars of requests. Clones share their permits.
#[derive(Clone)]
pub(super) struct GrammarThreads {
    /// Permits of grammars within their deadline.
    timely: Arc<Semaphore>,
    /// Permits of grammars after their deadline.
    late: Arc<Semaphore>,
    /// Keys of the grammars after their deadline.
    late_keys: Arc<Mutex<BTreeSet<u64>>>,
    deadline: Duration,
    log: Arc<LogThread>,
}

/// Number of grammars that are compiled at the same time, within their deadline.
const N_TIMELY: usize = 2;

/// Number of further threads whose grammars are late.
const N_LATE: usize = 6;

/// Virtual memory of a thread's stack.
const STACK_BYTES: usize = 64 << 20;

/// Time until a grammar is compiled, and time to wait for a thread.
const COMPILE_DEADLINE: Duration = Duration::from_secs(10);

/// Grammar of a request.
pub(super) struct RequestedGrammar {
    /// Field of the request that has the schema.
    pub(super) field: &'static str,
    pub(super) grammar: TopLevelGrammar,
    pub(super) compiler: Arc<LazyGrammarCompiler>,
}

/// Compiler of the grammars of a model. It takes a second to build.
pub(super) struct LazyGrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    n_vocab: usize,
    compiler: OnceLock<Result<GrammarCompiler, ApiError>>,
}

impl LazyGrammarCompiler {
    /// Creates a compiler, which [`Self::build`] or the first grammar initializes.
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, n_vocab: usize) -> Arc<Self> {
        Arc::new(Self { tokenizer: Arc::clone(tokenizer), n_vocab, compiler: OnceLock::new() })
    }

    /// Builds the compiler on a thread, so that the first request does not wait for it.
    pub(super) fn build(self: Arc<Self>) {
        // Without the thread, the first request builds it.
        let build = move || {
            if let Err(error) = self.compiler() {
                tracing::error!("{}", error.message());
            }
        };
        let _ = thread::Builder::new().name("grammar".to_owned()).spawn(build);
    }

    fn compiler(&self) -> &Result<GrammarCompiler, ApiError> {
        let new = || GrammarCompiler::new(&self.tokenizer, self.n_vocab).map_err(|error| ApiError::internal(&error));
        self.compiler.get_or_init(new)
    }

    fn compile(&self, field: &'static str, grammar: TopLevelGrammar) -> Result<TokenConstraint, ApiError> {
        let compiled = self.compiler().as_ref().map_err(ApiError::clone)?.compile(grammar);
        compiled.map_err(|error| ApiError::field(field, format!("{field}: the schema cannot be used: {error:#}")))
    }
}

impl RequestedGrammar {
    /// Compiles the grammar on a thread. Fails at the deadline.
    pub(super) async fn compile(self, threads: &GrammarThreads) -> Result<TokenConstraint, ApiError> {
        let Self { field, grammar, compiler } = self;
        let key = key_of(&grammar);
        threads.run(field, key, move || compiler.compile(field, grammar)).await
    }
}

/// Returns a number that is equal for equal grammars.
fn key_of(grammar: &TopLevelGrammar) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(grammar).unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

/// Grammar that is being compiled: its permit until the end of its thread.
struct RunningGrammar {
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    late_keys: Arc<Mutex<BTreeSet<u64>>>,
    key: u64,
}

impl Drop for RunningGrammar {
    fn drop(&mut self) {
        locked(&self.late_keys).remove(&self.key);
    }
}

impl GrammarThreads {
    /// Creates threads that warn about late grammars in `log`.
    pub(super) fn new(log: Arc<LogThread>) -> Self {
        let permits = |n| Arc::new(Semaphore::new(n));
        let (timely, late) = (permits(N_TIMELY), permits(N_LATE));
        Self { timely, late, late_keys: Arc::default(), deadline: COMPILE_DEADLINE, log }
    }

    /// Calls `compile` on a thread. A grammar that equals a late one is refused at once.
    async fn run<T: Send + 'static>(
        &self,
        field: &'static str,
        key: u64,
        compile: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if locked(&self.late_keys).contains(&key) {
            return Err(self.too_slow(field));
        }
        let permit = timeout(self.deadline, Arc::clone(&self.timely).acquire_owned()).await;
        let Ok(permit) = permit else { return Err(busy(field)) };
        let permit = permit.map_err(|error| ApiError::internal(&error.into()))?;
        let late_keys = Arc::clone(&self.late_keys);
        let running = Arc::new(RunningGrammar { permit: Mutex::new(Some(permit)), late_keys, key });
        let (sender, receiver) = oneshot::channel();
        let of_thread = Arc::clone(&running);
        let call = move || {
            let _ = sender.send(compile());
            drop(of_thread);
        };
        let started = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES).spawn(call);
        started.map_err(|error| ApiError::internal(&error.into()))?;
        self.watch(running);
        match timeout(self.deadline, receiver).await {
            Ok(compiled) => {
                compiled.unwrap_or_else(|_| Err(ApiError::internal(&anyhow!("failed to compile the schema"))))
            }
            Err(_) => Err(self.too_slow(field)),
        }
    }

    /// Makes a grammar late after the deadline, even if its request has ended by then.
    fn watch(&self, running: Arc<RunningGrammar>) {
        let (late, log, deadline) = (Arc::clone(&self.late), Arc::clone(&self.log), self.deadline);
        let running = Arc::downgrade(&running);
        tokio::spawn(async move {
            tokio::time::sleep(deadline).await;
            let Some(running) = running.upgrade() else { return };
            locked(&running.late_keys).insert(running.key);
            let seconds = deadline.as_secs();
            let warning = format!("a schema is not compiled after {seconds} seconds; its thread continues");
            log.add(RequestLogLine::Warning(warning));
            // Without a permit of late grammars, the grammar keeps its own.
            if let Ok(permit) = late.try_acquire_owned() {
                *locked(&running.permit) = Some(permit);
            }
        });
    }

    fn too_slow(&self, field: &'static str) -> ApiError {
        let seconds = self.deadline.as_secs();
        let problem = format!("{field}: the schema takes more than {seconds} seconds to compile; simplify it");
        ApiError::field(field, problem).with_code("schema_timeout")
    }
}

fn busy(field: &'static str) -> ApiError {
    let problem = format!("{field}: other schemas are being compiled; send the request again later");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, problem).with_code("schemas_busy")
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn threads(n_late: usize) -> GrammarThreads {
        let late = Arc::new(Semaphore::new(n_late));
        let log = Arc::new(LogThread::start(None::<std::fs::File>));
        GrammarThreads { late, deadline: Duration::from_millis(20), ..GrammarThreads::new(log) }
    }

    /// Starts a grammar that is compiled until the sender is dropped, and returns the refusal.
    fn endless(runtime: &Runtime, threads: &GrammarThreads, key: u64) -> (Sender<()>, ApiError) {
        let (resume, blocked) = channel::<()>();
        let compile = move || {
            let _ = blocked.recv();
            Ok(())
        };
        (resume, runtime.block_on(threads.run("tools", key, compile)).unwrap_err())
    }

    #[track_caller]
    fn check(error: &ApiError, status: StatusCode, want: &str) {
        let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!((error.status(), message.contains(want)), (status, true), "{message}");
    }

    /// Compiles a quick grammar, with a deadline that a busy machine keeps.
    fn quick(runtime: &Runtime, threads: &GrammarThreads) -> Result<i32, ApiError> {
        let patient = GrammarThreads { deadline: Duration::from_secs(60), ..threads.clone() };
        runtime.block_on(patient.run("tools", 99, || Ok(1)))
    }

    #[test]
    fn endless_grammars_are_refused_and_leave_others() {
        let (runtime, threads) = (runtime(), threads(6));
        let mut running = Vec::new();
        for key in 0..6 {
            let (resume, refused) = endless(&runtime, &threads, key);
            check(&refused, StatusCode::BAD_REQUEST, "tools: the schema takes more than 0 seconds");
            running.push(resume);
            // The task of the deadline may run after the answer.
            runtime.block_on(async {
                while threads.timely.available_permits() < N_TIMELY {
                    tokio::task::yield_now().await
                }
            });
        }
        assert_eq!((threads.late.available_permits(), quick(&runtime, &threads).unwrap()), (0, 1));
        let (_, again) = endless(&runtime, &threads, 3);
        check(&again, StatusCode::BAD_REQUEST, "simplify it");
        drop(running);
        runtime.block_on(async { threads.late.acquire_many(6).await.map(drop) }).unwrap();
        runtime.block_on(async {
            while !locked(&threads.late_keys).is_empty() {
                tokio::task::yield_now().await
            }
        });
    }

    #[test]
    fn the_number_of_threads_is_bounded() {
        let (runtime, threads) = (runtime(), threads(0));
        let running: Vec<_> = (0..2).map(|key| endless(&runtime, &threads, key)).collect();
        let (_, refused) = endless(&runtime, &threads, 2);
        check(&refused, StatusCode::SERVICE_UNAVAILABLE, "other schemas are being compiled");
        drop(running);
        assert_eq!(quick(&runtime, &threads).unwrap(), 1);
    }

    #[test]
    fn a_grammar_whose_request_is_cancelled_becomes_late() {
        let (runtime, threads) = (runtime(), threads(1));
        let (resume, blocked) = channel::<()>();
        let compile = move || Ok(blocked.recv().is_ok());
        let cancelled = async { timeout(Duration::ZERO, threads.run("tools", 1, compile)).await };
        assert!(runtime.block_on(cancelled).is_err());
        runtime.block_on(async {
            while threads.late.available_permits() > 0 {
                tokio::task::yield_now().await
            }
        });
        assert_eq!(threads.timely.available_permits(), N_TIMELY);
        drop(resume);
    }

    #[test]
    fn a_compiler_is_built_without_a_request() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart/tokenizer");
        let tokenizer = Arc::new(Tokenizer::from_directory(folder).unwrap());
        let grammars = LazyGrammarCompiler::new(&tokenizer, tokenizer.min_embedding_rows() as usize);
        Arc::clone(&grammars).build();
        while grammars.compiler.get().is_none() {
            thread::yield_now();
        }
        assert!(grammars.compiler().is_ok());
    }

    #[test]
    fn a_runtime_ends_during_a_compilation() {
        let (runtime, threads) = (runtime(), threads(6));
        let (resume, _) = endless(&runtime, &threads, 1);
        drop(runtime);
        drop(resume);
    }
}
