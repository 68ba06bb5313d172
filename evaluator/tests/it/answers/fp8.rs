//! Responses of models in fp8, with the scales of their export.

use super::*;

/// Writes scales for all linear layers but the second layer's MLP, as a run stores them.
fn write_fp8_scales(folder: &Path, lm: &Lm, input: f32) {
    let linears = lm.engine().model().layers().flat_map(LayerSpec::linears);
    let modules = linears.map(|linear| linear.module.clone()).filter(|module| !module.contains("layers.1.mlp"));
    let scales = modules.enumerate().map(|(i, module)| {
        (module, vec![Fp8LinearScales { input: input * (1.0 + i as f32 / 7.0), weight: 200.0 + 3.0 * i as f32 }])
    });
    fs::write(folder.join(FP8_SCALES), fp8_scales_to_json(&scales.collect(), lm.engine().model().config())).unwrap();
}

/// Amaxes of a batch would change the bits of a row. Scales that are fixed do not.
#[test]
fn answers_in_fp8_have_the_same_bits_in_every_batch_and_on_any_number_of_ranks() {
    let (folder, of_weights) = model(1);
    let model = folder.path().join("model");
    let requests = requests();
    for dtype in [DType::F32, DType::BF16] {
        write_fp8_scales(&model, &of_weights, 50.0);
        let load = || Lm::load(&model, None, dtype, Device::Cpu).unwrap().with_fp8_scales().unwrap();
        let want = answer(&load(), settings(), &requests);
        let dense = Lm::load(&model, None, dtype, Device::Cpu).unwrap();
        assert_ne!(answer(&dense, settings(), &requests), want, "FP8 has no effect");
        for n in [1, 4, 100] {
            let settings = BackendSettings { batch_size: Some(n), ..settings() };
            assert_eq!(answer(&load(), settings, &requests), want, "batches of {n} {dtype:?}");
        }
        let on_rank = |world: &World| {
            EngineBackend::new(&load(), settings(), InferenceGroup::replicated(world.group()))?.answer(&requests)
        };
        for answers in threads::run(2, Options::default(), on_rank).unwrap() {
            assert_eq!(answers, want, "2 ranks {dtype:?}");
        }
        // At a scale this large all inputs saturate.
        write_fp8_scales(&model, &of_weights, 1e6);
        assert_ne!(answer(&load(), settings(), &requests), want, "the scales have no effect");
    }
}

#[test]
fn fp8_needs_the_scales_of_the_models_layers() {
    let (folder, _lm) = model(1);
    let model = folder.path().join("model");
    let refused = || format!("{:#}", lm(&model).with_fp8_scales().err().unwrap());
    let without = refused();
    assert!(without.contains("has no fp8_scales.json") && without.contains("precision.recipe: delayed"), "{without}");
    let write = |module: &str| {
        let scales = [(module.to_owned(), vec![Fp8LinearScales { input: 1.0, weight: 1.0 }])].into();
        let entries = fp8_scales_to_json(&scales, lm(&model).engine().model().config());
        fs::write(model.join(FP8_SCALES), &entries).unwrap();
        entries
    };
    // Half of the entries, as of another program.
    let entries: serde_json::Map<_, _> = serde_json::from_str(&write("model.layers.1.mlp.up_proj")).unwrap();
    let half: serde_json::Map<_, _> = entries.into_iter().filter(|(module, _)| module.contains("layers.1")).collect();
    fs::write(model.join(FP8_SCALES), serde_json::to_string(&half).unwrap()).unwrap();
    let partial = refused();
    let missing = "it has no entry for model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj,";
    assert!(partial.contains(missing) && partial.contains("and 4 others; take the file of this"), "{partial}");
    assert_eq!(classify(&lm(&model).with_fp8_scales().err().unwrap()), ExitCode::Checkpoint);
    write("model.layers.7.mlp.up_proj");
    let other = refused();
    assert!(other.contains("no linear layer or experts model.layers.7.mlp.up_proj"), "{other}");
    assert!(other.contains("model/fp8_scales.json") && other.contains("export the run again"), "{other}");
    assert_eq!(classify(&lm(&model).with_fp8_scales().err().unwrap()), ExitCode::Checkpoint);
}

/// Writes scales of all experts' matrices, different for each, and of no linear layer.
fn write_scales_of_experts(folder: &Path, lm: &Lm, input: f32) {
    let scales = lm.engine().model().layers().flat_map(LayerSpec::expert_matrices).map(|matrix| {
        let of_expert = |i| Fp8LinearScales { input: input * (1.0 + i as f32 / 7.0), weight: 200.0 + 3.0 * i as f32 };
        (matrix.name.clone(), (0..matrix.n_experts).map(of_expert).collect())
    });
    fs::write(folder.join(FP8_SCALES), fp8_scales_to_json(&scales.collect(), lm.engine().model().config())).unwrap();
}

#[test]
fn experts_in_fp8_have_the_same_bits_in_every_batch_and_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let requests = requests();
    let dense = answer(&lm(&model), settings(), &requests);
    write_scales_of_experts(&model, &lm(&model), 50.0);
    let load = || lm(&model).with_fp8_scales().unwrap();
    let want = answer(&load(), settings(), &requests);
    assert_ne!(want, dense, "FP8 has no effect");
    for n in [1, 4, 100] {
        let settings = BackendSettings { batch_size: Some(n), ..settings() };
        assert_eq!(answer(&load(), settings, &requests), want, "batches of {n}");
    }
    let parallel_config = ParallelConfig { expert_parallel: 2, ..ParallelConfig::SINGLE_RANK };
    let on_rank = |world: &World| {
        let (lm, inference_group) = experts(&model, parallel_config, world)?;
        EngineBackend::new(&lm.with_fp8_scales()?, settings(), inference_group)?.answer(&requests)
    };
    for answers in threads::run(2, Options::default(), on_rank).unwrap() {
        assert_eq!(answers, want, "experts on two ranks");
    }
    write_scales_of_experts(&model, &lm(&model), 1e6);
    assert_ne!(answer(&load(), settings(), &requests), want, "the scales have no effect");
    let scales = fs::read_to_string(model.join(FP8_SCALES)).unwrap();
    let mut scales: serde_json::Value = serde_json::from_str(&scales).unwrap();
    let (_, first) = scales.as_object_mut().unwrap().iter_mut().next().unwrap();
    for key in ["input", "weight"] {
        first[key].as_array_mut().unwrap().pop();
    }
    fs::write(model.join(FP8_SCALES), scales.to_string()).unwrap();
    let refused = format!("{:#}", lm(&model).with_fp8_scales().err().unwrap());
    assert!(refused.contains("there are FP8 scales of 3 matrices, and the model has 4"), "{refused}");
}
