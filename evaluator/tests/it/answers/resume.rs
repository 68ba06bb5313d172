//! The response cache: resumption, and the identity of its model.

use super::*;

fn with_log(folder: &Path) -> BackendSettings {
    BackendSettings { cache_folder: Some(folder.to_owned()), ..settings() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the number of complete lines in all cache files.
fn n_lines(folder: &Path) -> usize {
    let count = |file: &PathBuf| fs::read(file).unwrap().iter().filter(|byte| **byte == b'\n').count();
    files(folder).iter().map(count).sum()
}

#[test]
fn an_interrupted_evaluation_resumes_with_another_number_of_ranks() {
    let (folder, lm) = model(1);
    let requests = requests();
    let want = answer(&lm, settings(), &requests);
    let logs = folder.path().join("logs");
    let on_ranks = |n| {
        let on_rank = |world: &World| {
            let lm = self::lm(&folder.path().join("model"));
            EngineBackend::new(&lm, with_log(&logs), InferenceGroup::replicated(world.group()))?.answer(&requests)
        };
        for answers in threads::run(n, Options::default(), on_rank).unwrap() {
            assert_eq!(answers, want, "{n}");
        }
    };
    on_ranks(3);
    let n_all = n_lines(&logs);
    assert_eq!(files(&logs).len(), 3);
    // Each file is truncated, one of them inside a line.
    for (i, file) in files(&logs).iter().enumerate() {
        let bytes = fs::read(file).unwrap();
        fs::write(file, &bytes[..bytes.len() - 40 * (i + 1)]).unwrap();
    }
    assert!((1..n_all).contains(&n_lines(&logs)), "{} of {n_all}", n_lines(&logs));
    on_ranks(2);
    // Only the missing requests are computed again.
    assert_eq!(n_lines(&logs), n_all);
    on_ranks(1);
    assert_eq!(n_lines(&logs), n_all);
}

#[test]
fn answers_are_read_for_the_same_model_and_for_no_other() {
    let (folder, lm) = model(1);
    let logs = folder.path().join("logs");
    let requests = [scored("Say wolf 4 times.", " wolf")];
    let first = answer(&lm, with_log(&logs), &requests);
    // A response that no model gives shows whether the cache is read.
    let log = &files(&logs)[0];
    let Response::Loglikelihood { logprob, .. } = first[0].response else { panic!("{first:?}") };
    let marked = fs::read_to_string(log).unwrap().replace(&logprob.to_string(), "-12345.5");
    fs::write(log, marked).unwrap();
    let marked = Response::Loglikelihood { logprob: -12345.5, is_greedy: false };
    assert_eq!(answer(&lm, with_log(&logs), &requests)[0].response, marked);
    // Other weights, another context, another dtype, another attention kernel, another tokenizer.
    let (_other, of_another) = model(2);
    assert_ne!(answer(&of_another, with_log(&logs), &requests)[0].response, marked);
    let shorter = BackendSettings { max_length: Some(32), ..with_log(&logs) };
    assert_eq!(answer(&lm, shorter, &requests), first);
    let model = folder.path().join("model");
    let halved = Lm::load(&model, None, DType::BF16, Device::Cpu).unwrap();
    assert_ne!(answer(&halved, with_log(&logs), &requests)[0].response, marked);
    let attention = AttentionChoice { implementation: AttentionImpl::Reference, deterministic: false };
    let other = self::lm(&model).with_attention(attention);
    assert_ne!(answer(&other, with_log(&logs), &requests)[0].response, marked);
    let config = model.join("tokenizer_config.json");
    fs::write(&config, fs::read_to_string(&config).unwrap() + "\n").unwrap();
    assert_eq!(answer(&self::lm(&model), with_log(&logs), &requests), first);
}
