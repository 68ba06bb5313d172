//! Responses of ranks that share a model or its experts: waits, and a stop on one rank.

use super::*;

/// Some ranks get no request, and compute fillers meanwhile. Tensor parallelism rounds differently.
#[test]
fn ranks_that_divide_experts_give_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let want = answer(&lm(&model), settings(), &requests());
    let (two, single) = (requests().len() / 2, ParallelConfig::SINGLE_RANK);
    for (n_ranks, parallel_config) in [
        (2, ParallelConfig { expert_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, pipeline_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, zero3: true, ..single }),
    ] {
        // Few requests leave some ranks without one.
        for n_requests in [1, two, two * 2] {
            let on_rank = |world: &World| {
                let (lm, inference_group) = experts(&model, parallel_config, world)?;
                EngineBackend::new(&lm, settings(), inference_group)?.answer(&requests()[..n_requests])
            };
            for answers in threads::run(n_ranks, Options::default(), on_rank).unwrap() {
                assert_eq!(answers, want[..n_requests], "{n_ranks} {parallel_config:?} {n_requests}");
            }
        }
    }
}

#[test]
fn a_stop_on_one_rank_ends_all_ranks_that_divide_experts() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let parallel_config = ParallelConfig { expert_parallel: 2, ..ParallelConfig::SINGLE_RANK };
    // The other ranks compute or are idle.
    for n_requests in [2, requests().len()] {
        let on_rank = |world: &World| {
            let (lm, inference_group) = experts(&model, parallel_config, world)?;
            let n_asked = Cell::new(0);
            let asked = || {
                n_asked.set(n_asked.get() + 1);
                world.rank() == 1 && n_asked.get() == 2
            };
            let settings = BackendSettings { batch_size: Some(1), ..settings() };
            let answered =
                EngineBackend::new(&lm, settings, inference_group)?.with_stop(asked).answer(&requests()[..n_requests]);
            Ok::<_, anyhow::Error>(answered.unwrap_err().is::<RequestsInterrupted>())
        };
        assert_eq!(threads::run(4, Options::default(), on_rank).unwrap(), [true; 4]);
    }
}

/// Returns the responses of three ranks. The second rank sleeps for this time before each batch.
fn with_a_slow_rank(
    pause: Duration,
    batch_size: Option<usize>,
    inference_group: impl Fn(&World) -> InferenceGroup + Sync,
) -> Result<Vec<usize>, candlewick_comm::Error> {
    let (folder, _lm) = model(1);
    let (requests, options) = (requests(), Options { timeout: TIMEOUT, ..Options::default() });
    let on_rank = |world: &World| {
        let lm = self::lm(&folder.path().join("model"));
        let slow = |_: RequestProgress| {
            if world.rank() == 1 {
                let _ = world.await_failure(pause);
            }
        };
        let inference_group = inference_group(world).with_keep_alive(world.keep_alive());
        let settings = BackendSettings { batch_size, ..settings() };
        let mut answers = EngineBackend::new(&lm, settings, inference_group)?.with_progress(slow);
        Ok::<_, anyhow::Error>(answers.answer(&requests)?.len())
    };
    threads::run(3, options, on_rank)
}

const TIMEOUT: Duration = Duration::from_secs(1);

/// Returns true if one of five runs answers all requests on all ranks. A busy machine may suspend a rank for longer than the
/// timeout.
fn is_waited_for(run: impl Fn() -> Result<Vec<usize>, candlewick_comm::Error>) -> bool {
    (0..5).any(|_| run().is_ok_and(|answered| answered == [requests().len(); 3]))
}

#[test]
fn a_rank_with_a_copy_of_its_own_is_waited_for_as_long_as_it_takes() {
    let replicated = |world: &World| InferenceGroup::replicated(world.group());
    assert!(is_waited_for(|| with_a_slow_rank(2 * TIMEOUT, Some(100), replicated)));
}

/// Ranks wait for each other during computation, so the watchdog must notice a step that never ends.
#[test]
fn ranks_that_share_a_model_copy_are_waited_for_at_each_step() {
    let together =
        |world: &World| InferenceGroup { replica: world.group(), ..InferenceGroup::replicated(world.group()) };
    assert!(is_waited_for(|| with_a_slow_rank(TIMEOUT / 8, Some(2), together)));
    assert!(with_a_slow_rank(3 * TIMEOUT, Some(2), together).is_err());
}

/// This holds for ranks with replicas, and for ranks that share one model.
#[test]
fn a_stop_on_one_rank_ends_all_of_them() {
    let (folder, _lm) = model(1);
    let requests = requests();
    let inference_groups: [fn(&World) -> InferenceGroup; 2] = [
        |world| InferenceGroup::replicated(world.group()),
        |world| {
            let copy = world.group();
            InferenceGroup {
                world: world.group(),
                data_parallel: Arc::new(Solo),
                reports: copy.rank() == 0,
                replica: copy,
                lockstep: None,
                keep_alive: None,
            }
        },
    ];
    for inference_group in inference_groups {
        let on_rank = |world: &World| {
            let lm = self::lm(&folder.path().join("model"));
            let n_asked = Cell::new(0);
            let asked = || {
                n_asked.set(n_asked.get() + 1);
                world.rank() == 1 && n_asked.get() == 3
            };
            let settings = BackendSettings { batch_size: Some(1), ..settings() };
            let answered =
                EngineBackend::new(&lm, settings, inference_group(world))?.with_stop(asked).answer(&requests);
            Ok::<_, anyhow::Error>((answered.unwrap_err().is::<RequestsInterrupted>(), n_asked.get()))
        };
        let ends = threads::run(2, Options::default(), on_rank).unwrap();
        assert!(ends.iter().all(|(is_stopped, _)| *is_stopped), "{ends:?}");
        assert_eq!(ends[1].1, 3, "nothing is computed after a stop");
    }
}
