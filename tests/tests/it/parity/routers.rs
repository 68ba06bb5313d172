//! Losses and totals of routers are those of one rank on every mesh, and the gradient of each loss alone.

use candlewick_comm::mesh::Degrees;
use candlewick_model::RouterLoss::{
    self, GlobalLoadBalancing, LoadBalancing, SequenceLoadBalancing, TransformersLoadBalancing, Z,
};
use candlewick_model::{ExpertCapacity, ExpertSelection, ForcedExpertLoad, RouterDtype, RouterSettings, RouterTotal};
use candlewick_ops::DropPolicy;
use candlewick_parallel::{CausalLm, SequenceParallel, TokenDispatcher, ZeroStage};

use super::ONE;
use super::case::{Batching, DOTS1, MOE_MTP, ModelCase, QWEN3_MOE, ROUTERS, WEIGHTED_INPUTS, micros};
use super::faulty_group::GroupOp;
use super::rank::{Strategy, compare_tensors};
use super::router_step::{
    ExpertInput, Nothing, RouterRun, RouterStep, check_close, compare_steps, most_tokens, step, step_with,
};

/// Compares each loss with one rank. `losses` do not depend on the mesh.
#[track_caller]
fn check(degrees: Degrees, zero_stage: Option<ZeroStage>, losses: &[RouterLoss]) {
    check_cases([DOTS1, QWEN3_MOE], degrees, zero_stage, losses);
}

#[track_caller]
fn check_cases(cases: [ModelCase; 2], degrees: Degrees, zero_stage: Option<ZeroStage>, losses: &[RouterLoss]) {
    let sequence_parallel = SequenceParallel::On;
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    let strategy = Strategy { degrees, zero_stage, sequence_parallel, chunk_layers, ..Strategy::ONE_RANK };
    for case in cases {
        for batching in [Batching::Accumulated(3), Batching::Packed] {
            for loss in losses {
                let what = format!("{degrees} {case:?} {batching:?} {loss:?}");
                let one_rank = step(Strategy::ONE_RANK, case, batching, *loss);
                check_close(&what, &step(strategy, case, batching, *loss), &one_rank);
            }
        }
    }
}

#[test]
fn losses_of_routers_are_those_of_one_rank_where_ranks_split_micro_batches() {
    let losses = RouterLoss::ALL;
    check(Degrees { tp: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { tp: 2, cp: 2, ep: 2, etp: 2, ..ONE }, None, &losses);
    check(Degrees { cp: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { cp: 2, sp: 2, ep: 4, ..ONE }, None, &losses);
    check(Degrees { pp: 2, cp: 2, ep: 2, ..ONE }, None, &losses);
}

#[test]
fn losses_of_routers_are_those_of_one_rank_where_ranks_have_other_micro_batches() {
    // The fractions of a micro-batch depend on the micro-batches, those of a sequence or of the step do not.
    let losses = [SequenceLoadBalancing, GlobalLoadBalancing, Z];
    check(Degrees { dp_replicate: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Three), &losses);
    check(Degrees { dp_shard: 2, tp: 2, ep: 4, ..ONE }, Some(ZeroStage::One), &losses);
    check(Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::One), &losses);
}

/// Padded sequences give the losses, loads, biases and gradients of the same sequences without padding.
#[test]
fn pad_tokens_of_sequences_do_not_count() {
    let split = [ONE, Degrees { tp: 2, ep: 2, ..ONE }, Degrees { cp: 2, ep: 2, ..ONE }];
    let data = [Degrees { dp_replicate: 2, ep: 2, ..ONE }];
    let all = [(&split[..], &RouterLoss::ALL[..]), (&data, &[SequenceLoadBalancing, GlobalLoadBalancing, Z])];
    for (meshes, losses) in all {
        for (degrees, loss) in meshes.iter().flat_map(|degrees| losses.iter().map(move |loss| (*degrees, *loss))) {
            let strategy = Strategy { degrees, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK };
            for case in [DOTS1, QWEN3_MOE] {
                let router = RouterSettings { losses: vec![loss], bias_update_rate: 0.02, ..RouterSettings::default() };
                let step = |strategy, batching| step_with(strategy, case, batching, &router, &CausalLm);
                let packed = step(Strategy::ONE_RANK, Batching::Packed);
                check_close(&format!("{degrees} {case:?} {loss:?}"), &step(strategy, Batching::Padded), &packed);
            }
        }
    }
}

/// Stages of several chunks, and an MTP layer with experts on the last stage.
#[test]
fn the_loss_over_all_layers_is_that_of_one_rank_on_pipeline_stages() {
    let (chunks, stages) = (Some(&[1usize, 1, 1, 1][..]), Some(&[3usize, 1][..]));
    for (case, chunk_layers) in [(DOTS1, chunks), (QWEN3_MOE, chunks), (MOE_MTP, stages)] {
        let pipeline = Strategy { degrees: Degrees { pp: 2, ..ONE }, chunk_layers, ..Strategy::ONE_RANK };
        let step = |strategy| step(strategy, case, Batching::Accumulated(3), TransformersLoadBalancing);
        check_close(&format!("{case:?}"), &step(pipeline), &step(Strategy::ONE_RANK));
    }
}

/// The micro-batches of one rank are those of the data parallel ranks.
#[test]
fn losses_of_micro_batches_are_those_of_one_rank_with_the_same_micro_batches() {
    for case in [DOTS1, QWEN3_MOE] {
        for loss in [LoadBalancing, TransformersLoadBalancing] {
            let one_rank = step(Strategy::ONE_RANK, case, Batching::Accumulated(2), loss);
            for (degrees, zero_stage) in [
                (Degrees { dp_replicate: 2, ..ONE }, None),
                (Degrees { dp_replicate: 2, ep: 2, ..ONE }, None),
                (Degrees { dp_shard: 2, tp: 2, ep: 4, ..ONE }, Some(ZeroStage::Three)),
                (Degrees { dp_shard: 2, cp: 2, ep: 2, ..ONE }, Some(ZeroStage::One)),
            ] {
                let sequence_parallel = SequenceParallel::On;
                let strategy = Strategy { degrees, zero_stage, sequence_parallel, ..Strategy::ONE_RANK };
                let what = format!("{degrees} {case:?} {loss:?}");
                check_close(&what, &step(strategy, case, Batching::Packed, loss), &one_rank);
            }
        }
    }
}

/// The second loss has half of the first one's coefficient.
#[test]
fn the_gradient_of_two_losses_is_the_sum_of_theirs() {
    for losses in [[LoadBalancing, GlobalLoadBalancing], [TransformersLoadBalancing, SequenceLoadBalancing]] {
        for degrees in [ONE, Degrees { cp: 2, ep: 2, ..ONE }] {
            let strategy = Strategy { degrees, ..Strategy::ONE_RANK };
            let [first, second] = losses.map(|loss| step(strategy, DOTS1, Batching::Accumulated(3), loss));
            let router = RouterSettings { losses: losses.to_vec(), ..RouterSettings::default() };
            let both = step_with(strategy, DOTS1, Batching::Accumulated(3), &router, &Nothing);
            let mut sum = first;
            sum.layers.extend(&second.layers);
            assert_eq!(both.layers, sum.layers);
            for (name, grad) in &mut sum.grads {
                grad.iter_mut().zip(&second.grads[name]).for_each(|(sum, of_second)| *sum += of_second / 2.0);
            }
            check_close(&format!("{degrees} {losses:?}"), &both, &sum);
        }
    }
}

/// The third micro-batch of a step reads the counts of the first two. A later step begins with none.
#[test]
fn counts_of_a_step_are_not_those_of_the_next() {
    for loss in [GlobalLoadBalancing, TransformersLoadBalancing] {
        let router = &RouterSettings { losses: vec![loss], ..RouterSettings::default() };
        for degrees in [ONE, Degrees { dp_replicate: 2, ep: 2, ..ONE }] {
            let strategy = Strategy { degrees, ..Strategy::ONE_RANK };
            let (batching, expert_input) = (Batching::Accumulated(3), ExpertInput::Ragged);
            let run =
                RouterRun { strategy, case: DOTS1, batching, router, objective: &Nothing, expert_input, fault: None };
            let steps = run.steps_without_updates(3);
            assert!(steps[1] == steps[0] && steps[2] == steps[0], "{degrees} {loss:?}: {steps:?}");
        }
    }
}

const ALL_TOKENS: &str = "cp-sp-tp";
const ALL_RANKS: &str = "dp_replicate-dp_shard-cp-sp-tp";

/// Each loss is detected as wrong if ranks do not sum its counts.
#[test]
fn a_corrupted_sum_of_counts_changes_each_balancing_loss() {
    for (loss, degrees, group) in [
        (LoadBalancing, Degrees { cp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (LoadBalancing, Degrees { tp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (SequenceLoadBalancing, Degrees { cp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (SequenceLoadBalancing, Degrees { tp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (TransformersLoadBalancing, Degrees { cp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (TransformersLoadBalancing, Degrees { tp: 2, ep: 2, ..ONE }, ALL_TOKENS),
        (GlobalLoadBalancing, Degrees { cp: 2, ep: 2, ..ONE }, ALL_RANKS),
        (GlobalLoadBalancing, Degrees { dp_replicate: 2, ep: 2, ..ONE }, ALL_RANKS),
    ] {
        let sequence_parallel = SequenceParallel::On;
        let strategy = Strategy { degrees, sequence_parallel, ..Strategy::ONE_RANK };
        let router = &RouterSettings { losses: vec![loss], ..RouterSettings::default() };
        let (batching, expert_input) = (Batching::Packed, ExpertInput::Ragged);
        let fault = &GroupOp { group: group.to_owned(), op: "all_reduce" };
        for case in [DOTS1, QWEN3_MOE] {
            let run =
                RouterRun { strategy, case, batching, router, objective: &Nothing, expert_input, fault: Some(fault) };
            let one_rank = step(Strategy::ONE_RANK, case, batching, loss);
            let difference = compare_steps(&run.step(), &one_rank);
            assert!(difference.is_err(), "{degrees} {case:?} {loss:?}: a corrupted {fault} is not detected");
        }
    }
}

/// Counts of a step are summed over the ranks of the residual stream, then over all others.
#[test]
fn a_corrupted_sum_of_counts_changes_the_expert_biases() {
    let router = &RouterSettings { losses: vec![Z], bias_update_rate: 0.02, ..RouterSettings::default() };
    let (batching, objective, expert_input) = (Batching::Packed, &CausalLm, ExpertInput::Ragged);
    let step = |degrees, fault: Option<&GroupOp>| {
        let strategy = Strategy { degrees, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK };
        RouterRun { strategy, case: DOTS1, batching, router, objective, expert_input, fault }.step()
    };
    let one_rank = step(ONE, None);
    for (degrees, group) in [
        (Degrees { dp_replicate: 2, ep: 2, ..ONE }, "pp-dp_replicate-dp_shard-cp-sp"),
        (Degrees { cp: 2, ep: 2, ..ONE }, "pp-dp_replicate-dp_shard-cp-sp"),
        (Degrees { tp: 2, ep: 2, ..ONE }, "tp"),
    ] {
        assert_eq!(step(degrees, None).biases, one_rank.biases, "{degrees}");
        let fault = GroupOp { group: group.to_owned(), op: "all_reduce" };
        assert_ne!(step(degrees, Some(&fault)).biases, one_rank.biases, "{degrees}: {fault} is not detected");
    }
}

#[test]
fn routers_with_keys_of_megatron_are_those_of_one_rank() {
    check_cases(ROUTERS, Degrees { tp: 2, ep: 2, ..ONE }, None, &RouterLoss::ALL);
    let losses = [SequenceLoadBalancing, GlobalLoadBalancing];
    check_cases(ROUTERS, Degrees { dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::Three), &losses);
    let grads = |case| {
        let router = RouterSettings { losses: vec![Z], ..RouterSettings::default() };
        step_with(Strategy::ONE_RANK, case, Batching::Packed, &router, &CausalLm).grads
    };
    let [softmax_last, sqrt_softplus] = ROUTERS.map(grads);
    assert_ne!(sqrt_softplus, grads(QWEN3_MOE), "the router is the family's");
    // With normalized weights it makes no difference whether experts are selected before the softmax.
    compare_tensors("gradient", &softmax_last, &grads(QWEN3_MOE)).unwrap();
}

#[test]
fn losses_of_routers_differ() {
    let mean = |loss| step(Strategy::ONE_RANK, DOTS1, Batching::Accumulated(3), loss).layers.iter().sum::<f64>();
    let means = [LoadBalancing, SequenceLoadBalancing, GlobalLoadBalancing].map(mean);
    assert!(means[0] != means[1] && means[0] != means[2] && means[1] != means[2], "{means:?}");
    // A token selects two experts.
    let of_transformers = mean(TransformersLoadBalancing);
    assert!(of_transformers > 2.0 && of_transformers != 2.0 * means[0], "{of_transformers} {means:?}");
}

#[test]
fn jittered_routers_are_those_of_one_rank() {
    let router = |input_jitter_eps| RouterSettings { losses: vec![Z], input_jitter_eps, ..RouterSettings::default() };
    for degrees in [Degrees { tp: 2, ep: 2, ..ONE }, Degrees { cp: 2, ep: 2, ..ONE }] {
        let strategy = Strategy { degrees, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |strategy, eps| step_with(strategy, case, Batching::Packed, &router(eps), &CausalLm);
            let one_rank = step(Strategy::ONE_RANK, 0.25);
            check_close(&format!("{degrees} {case:?}"), &step(strategy, 0.25), &one_rank);
            assert_ne!(one_rank.layers, step(Strategy::ONE_RANK, 0.0).layers);
        }
    }
}

#[test]
fn routers_in_f64_are_those_of_one_rank() {
    let router = |dtype| RouterSettings { losses: vec![Z], dtype, ..RouterSettings::default() };
    for degrees in [Degrees { dp_replicate: 2, ep: 2, ..ONE }, Degrees { tp: 2, ep: 2, ..ONE }] {
        let sequence_parallel = if degrees.tp > 1 { SequenceParallel::On } else { SequenceParallel::Off };
        let strategy = Strategy { degrees, sequence_parallel, ..Strategy::ONE_RANK };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |strategy, dtype| step_with(strategy, case, Batching::Packed, &router(dtype), &CausalLm);
            let one_rank = step(Strategy::ONE_RANK, RouterDtype::F64);
            check_close(&format!("{degrees} {case:?}"), &step(strategy, RouterDtype::F64), &one_rank);
            let of_f32 = step(Strategy::ONE_RANK, RouterDtype::F32);
            check_close(&format!("f32 {case:?}"), &of_f32, &one_rank);
            assert_ne!(one_rank.grads, of_f32.grads, "{case:?}: routers compute in f32");
        }
    }
}

#[test]
fn a_capacity_drops_the_same_tokens_under_expert_parallelism() {
    for policy in [DropPolicy::Weights, DropPolicy::Position] {
        let capacity = Some(ExpertCapacity { factor: 0.75, policy });
        let router = RouterSettings { losses: vec![LoadBalancing], capacity, ..RouterSettings::default() };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |ep| {
                let strategy = Strategy { degrees: Degrees { dp_replicate: 4, ep, ..ONE }, ..Strategy::ONE_RANK };
                step_with(strategy, case, Batching::Packed, &router, &CausalLm)
            };
            let replicated = step(1);
            for total in replicated.totals.values() {
                let selected: f32 = total.expert_counts.iter().sum();
                assert!(total.n_dropped > 0.1 * selected && total.n_dropped < 0.9 * selected, "{total:?}");
            }
            for ep in [2, 4] {
                check_close(&format!("ep {ep} {case:?} {policy:?}"), &step(ep), &replicated);
            }
        }
    }
}

/// The first layer with experts has the same input with and without a capacity.
#[test]
fn losses_metrics_and_biases_count_the_selections_before_the_capacity_drops_any() {
    let batching = Batching::Accumulated(3);
    let n_tokens: usize = micros(batching, 0, 0, 1).0.iter().map(|micro| micro.seqs.n_tokens()).sum();
    for loss in [LoadBalancing, SequenceLoadBalancing, GlobalLoadBalancing, Z] {
        for policy in [DropPolicy::Weights, DropPolicy::Position] {
            let step = |capacity| {
                let losses = vec![loss];
                let router = RouterSettings { losses, capacity, bias_update_rate: 0.02, ..RouterSettings::default() };
                step_with(Strategy::ONE_RANK, DOTS1, batching, &router, &CausalLm)
            };
            let (limited, unlimited) = (step(Some(ExpertCapacity { factor: 0.5, policy })), step(None));
            let (layer_idx, total) = limited.totals.first_key_value().unwrap();
            assert!(total.n_dropped > 0.0 && unlimited.totals[layer_idx].n_dropped == 0.0);
            assert_eq!(total.expert_counts, unlimited.totals[layer_idx].expert_counts);
            // Micro-batches add up, and a layer that is computed again in backward counts once.
            for total in limited.totals.values() {
                assert_eq!(total.n_tokens, n_tokens as f32);
                assert_eq!(total.expert_counts.iter().sum::<f32>(), 2.0 * total.n_tokens);
            }
            assert!(limited.layers[*layer_idx] > 0.0);
            assert_eq!(limited.layers[*layer_idx], unlimited.layers[*layer_idx], "{loss:?} {policy:?}");
            let (name, bias) = limited.biases.first_key_value().unwrap();
            assert!(name.starts_with(&format!("model.layers.{layer_idx}.")) && bias == &unlimited.biases[name]);
        }
    }
}

/// Ranks have different numbers of tokens. So experts have more rows than the capacity of most ranks.
#[test]
fn experts_padded_to_their_capacity_train_as_those_without_padding() {
    let most = most_tokens(Batching::Packed, 4);
    assert!((0..4).any(|rank| micros(Batching::Packed, 0, rank, 4).0[0].seqs.n_tokens() < most[0]));
    for (degrees, dispatcher) in [
        (ONE, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 4, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { dp_shard: 2, tp: 2, ep: 4, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_shard: 2, cp: 2, ep: 2, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }, TokenDispatcher::AllToAll),
    ] {
        check_padding(degrees, dispatcher);
    }
}

/// Compares a step with padding and one without, in all batchings and with both policies.
#[track_caller]
fn check_padding(degrees: Degrees, token_dispatcher: TokenDispatcher) {
    let zero_stage = (degrees.dp_shard > 1).then_some(ZeroStage::One);
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    let sequence_parallel = SequenceParallel::On;
    let strategy =
        Strategy { degrees, zero_stage, sequence_parallel, chunk_layers, token_dispatcher, ..Strategy::ONE_RANK };
    for policy in [DropPolicy::Weights, DropPolicy::Position] {
        let capacity = Some(ExpertCapacity { factor: 0.75, policy });
        let router = RouterSettings { losses: vec![LoadBalancing], capacity, ..RouterSettings::default() };
        for case in [DOTS1, QWEN3_MOE, WEIGHTED_INPUTS] {
            for batching in [Batching::Packed, Batching::Accumulated(3)] {
                let (router, objective, fault) = (&router, &CausalLm, None);
                let step = |expert_input| {
                    RouterRun { strategy, case, batching, router, objective, expert_input, fault }.step()
                };
                let (padded, ragged) = (step(ExpertInput::Padded), step(ExpertInput::Ragged));
                let what = format!("{degrees} {token_dispatcher:?} {case:?} {batching:?} {policy:?}");
                check_close(&what, &padded, &ragged);
                assert!(ragged.totals.values().all(|total| total.n_dropped > 0.0), "{what}: no token is dropped");
                if strategy.degrees.n_ranks() == 1 {
                    assert_eq!((&padded.layers, &padded.grads), (&ragged.layers, &ragged.grads), "{what}");
                }
            }
        }
    }
}

/// Sinkhorn balances the tokens of a rank's micro-batch. So meshes with the same micro-batches on each rank are compared.
#[test]
fn sinkhorn_selects_the_same_experts_under_expert_and_pipeline_parallelism() {
    let selecting = |selection| RouterSettings { losses: vec![Z], selection, ..RouterSettings::default() };
    let step = |degrees, selection| {
        let strategy = Strategy { degrees, ..Strategy::ONE_RANK };
        step_with(strategy, QWEN3_MOE, Batching::Accumulated(3), &selecting(selection), &CausalLm)
    };
    let one_rank = step(ONE, ExpertSelection::Sinkhorn);
    check_close("pp", &step(Degrees { pp: 2, ..ONE }, ExpertSelection::Sinkhorn), &one_rank);
    let loads = |step: &RouterStep| step.totals.values().map(|total| total.expert_counts.clone()).collect::<Vec<_>>();
    assert_ne!(loads(&one_rank), loads(&step(ONE, ExpertSelection::TopK)));
    let replicated = step(Degrees { dp_replicate: 4, ..ONE }, ExpertSelection::Sinkhorn);
    for [ep, etp] in [[2, 1], [4, 1], [2, 2]] {
        let ours = step(Degrees { dp_replicate: 4, ep, etp, ..ONE }, ExpertSelection::Sinkhorn);
        check_close(&format!("ep {ep} etp {etp}"), &ours, &replicated);
    }
}

#[test]
fn forced_loads_are_balanced_and_skewed() {
    let imbalance = |forced_load| {
        let router = RouterSettings { losses: vec![Z], forced_load, ..RouterSettings::default() };
        let step = step_with(Strategy::ONE_RANK, QWEN3_MOE, Batching::Packed, &router, &CausalLm);
        let of_layer = |total: &RouterTotal| {
            let counts = &total.expert_counts;
            counts.iter().copied().fold(0.0, f32::max) * counts.len() as f32 / counts.iter().sum::<f32>()
        };
        step.totals.values().map(of_layer).fold(0.0, f32::max)
    };
    let (balanced, skewed) = (imbalance(ForcedExpertLoad::Random), imbalance(ForcedExpertLoad::Biased { std: 100.0 }));
    // With large biases all tokens select the same two of eight experts.
    assert!(balanced < 2.0 && skewed == 4.0, "{balanced} {skewed}");
}
