//! Compilation of grammars on threads of their own, with a deadline for the answer.
//!
//! llguidance recurses through a schema, so the threads have large stacks. A thread cannot be stopped. A slow one holds its
//! permit, and delays other grammars alone.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use axum::http::StatusCode;
use candlewick_text::tokenizer::Tokenizer;
use llguidance::api::TopLevelGrammar;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::api_error::ApiError;
use crate::constraint::{GrammarCompiler, TokenConstraint};

/// Number of grammars that are compiled at the same time.
pub(super) const N_GRAMMAR_THREADS: usize = 2;

/// Virtual memory of a thread's stack.
const STACK_BYTES: usize = 64 << 20;

/// Time until a grammar is compiled.
const COMPILE_DEADLINE: Duration = Duration::from_secs(10);

/// Grammar of a request.
pub(super) struct RequestedGrammar {
    /// Field of the request that has the schema.
    pub(super) field: &'static str,
    pub(super) grammar: TopLevelGrammar,
    pub(super) compiler: Arc<ModelGrammars>,
}

/// Compiler of the grammars of a model.
pub(super) struct ModelGrammars {
    tokenizer: Arc<Tokenizer>,
    n_vocab: usize,
    compiler: OnceLock<Result<GrammarCompiler, ApiError>>,
}

impl ModelGrammars {
    /// Creates a compiler, which the first grammar initializes.
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, n_vocab: usize) -> Arc<Self> {
        Arc::new(Self { tokenizer: Arc::clone(tokenizer), n_vocab, compiler: OnceLock::new() })
    }

    fn compile(&self, field: &'static str, grammar: TopLevelGrammar) -> Result<TokenConstraint, ApiError> {
        let compiler = self.compiler.get_or_init(|| {
            GrammarCompiler::new(&self.tokenizer, self.n_vocab).map_err(|error| ApiError::internal(&error))
        });
        let compiled = compiler.as_ref().map_err(ApiError::clone)?.compile(grammar);
        compiled.map_err(|error| ApiError::field(field, format!("{field}: the schema cannot be used: {error:#}")))
    }
}

impl RequestedGrammar {
    /// Compiles the grammar on a thread with a permit of `threads`. Fails at the deadline.
    pub(super) async fn compile(self, threads: &Arc<Semaphore>) -> Result<TokenConstraint, ApiError> {
        let Self { field, grammar, compiler } = self;
        run_with_deadline(field, threads, COMPILE_DEADLINE, move || compiler.compile(field, grammar)).await
    }
}

async fn run_with_deadline<T: Send + 'static>(
    field: &'static str,
    threads: &Arc<Semaphore>,
    deadline: Duration,
    compile: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let compiled = async {
        let permit = Arc::clone(threads).acquire_owned().await.map_err(|error| ApiError::internal(&error.into()))?;
        let (sender, receiver) = oneshot::channel();
        let run = move || {
            let _permit = permit;
            let _ = sender.send(compile());
        };
        let started = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES).spawn(run);
        started.map_err(|error| ApiError::internal(&error.into()))?;
        receiver.await.unwrap_or_else(|_| Err(ApiError::internal(&anyhow!("failed to compile the schema"))))
    };
    timeout(deadline, compiled).await.unwrap_or_else(|_| {
        let seconds = deadline.as_secs();
        let problem =
            format!("{field}: the schema is not compiled after {seconds} seconds; simplify it, or try again later");
        Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, problem).with_code("schema_timeout"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_slow_grammar_ends_its_request_and_leaves_other_permits_free() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let threads = Arc::new(Semaphore::new(2));
        let (resume, blocked) = channel::<()>();
        let slow = move || {
            let _ = blocked.recv();
            Ok(0)
        };
        let refused = runtime.block_on(run_with_deadline("tools", &threads, Duration::from_millis(5), slow));
        assert!(
            refused.unwrap_err().json()["error"]["message"].as_str().unwrap().starts_with("tools: the schema is not")
        );
        assert_eq!(threads.available_permits(), 1);
        let quick = run_with_deadline("tools", &threads, COMPILE_DEADLINE, || Ok(1));
        assert_eq!(runtime.block_on(quick).unwrap(), 1);
        drop(resume);
        let both = runtime.block_on(async { threads.acquire_many(2).await.is_ok() });
        assert!(both);
    }
}
