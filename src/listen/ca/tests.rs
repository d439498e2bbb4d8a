use std::sync::Mutex;

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{ServerName, UnixTime};

use super::*;

const HOUR: Duration = Duration::from_hours(1);

/// An authority whose clock the test turns.
fn turned_by_hand() -> (Authority, Arc<Mutex<SystemTime>>) {
    let now = Arc::new(Mutex::new(SystemTime::now()));
    let clock = now.clone();
    let authority = Authority::with(None, Terms::default(), Arc::new(move || *clock.lock().unwrap()));
    (authority.unwrap(), now)
}

/// Whether a client that trusts `trusted` takes what is shown for `host` now.
fn takes(authority: &Authority, trusted: &[CertificateDer<'static>], host: &str, now: SystemTime) -> bool {
    let mut state = authority.state();
    authority.turn_to(&mut state, now).unwrap();
    let signer = state.signer(authority.terms, now).unwrap();
    drop(state);
    // What a handshake would show: the leaf in use, if it is still good.
    let (chain, _) = signer.leaf(host, authority.terms, now).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(trusted.iter().cloned());
    let crypto = authority.crypto.clone();
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), crypto).build().unwrap();
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let time = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
    verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], time).is_ok()
}

#[test]
fn over_a_month_of_turns_no_client_that_read_the_bundle_in_two_days_fails() {
    let (authority, now) = turned_by_hand();
    let mut read: Vec<Vec<CertificateDer<'static>>> = Vec::new();
    let mut most = 0;
    for hour in 0..24 * 30 {
        let at = *now.lock().unwrap();
        authority.turn().unwrap();
        let trusted = authority.trusted().0;
        most = most.max(trusted.len());
        read.push(trusted);
        for old in &read[read.len().saturating_sub(48)..] {
            assert!(takes(&authority, old, "api.openai.com", at), "hour {hour}");
        }
        *now.lock().unwrap() = at + HOUR;
    }
    assert!(authority.trusted().1 >= 7, "it turned: {}", authority.trusted().1);
    assert_eq!(most, 2, "the old and the new");
}

#[test]
fn a_leaf_is_kept_while_it_is_good_and_renewed_before_its_end() {
    let (authority, now) = turned_by_hand();
    let first = authority.serve_as("api.openai.com").unwrap();
    assert!(Arc::ptr_eq(&first, &authority.serve_as("api.openai.com").unwrap()));
    *now.lock().unwrap() += HOUR * 17;
    assert!(Arc::ptr_eq(&first, &authority.serve_as("api.openai.com").unwrap()));
    *now.lock().unwrap() += HOUR * 2;
    assert!(!Arc::ptr_eq(&first, &authority.serve_as("api.openai.com").unwrap()));
}

#[test]
fn a_machine_that_slept_past_the_end_or_whose_clock_was_set_back_makes_a_new_ca() {
    let (authority, now) = turned_by_hand();
    let before = authority.trusted();
    *now.lock().unwrap() += HOUR * 24 * 30;
    authority.serve_as("api.openai.com").unwrap();
    let after = authority.trusted();
    assert!(after.1 > before.1 && after.0.len() == 1 && after.0 != before.0);
    let at = *now.lock().unwrap() - HOUR * 24 * 60;
    *now.lock().unwrap() = at;
    authority.serve_as("api.openai.com").unwrap();
    assert!(takes(&authority, &authority.trusted().0, "api.openai.com", at));
}

#[test]
fn an_address_is_certified_as_an_address_and_a_name_as_itself_alone() {
    let (authority, now) = turned_by_hand();
    let (trusted, at) = (authority.trusted().0, *now.lock().unwrap());
    for host in ["api.openai.com", "10.1.2.3", "::1"] {
        assert!(takes(&authority, &trusted, host, at), "{host}");
    }
    let signer = Signer::fresh(Terms::default(), at).unwrap();
    assert!(!takes(&authority, signer.published(), "api.openai.com", at));
}

#[test]
fn the_number_of_kept_leaves_is_bounded() {
    let (authority, _) = turned_by_hand();
    for n in 0..MOST_LEAVES + 8 {
        authority.serve_as(&format!("h{n}.example")).unwrap();
    }
    assert_eq!(authority.state().leaves.len(), MOST_LEAVES);
}

#[tokio::test]
async fn the_files_are_renewed_at_a_turn_and_when_somebody_took_them_away() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, now) = turned_by_hand();
    let authority = Arc::new(authority);
    let paths =
        files::CaPaths { cert: dir.path().join("l.ca.pem"), bundle: dir.path().join("l.ca-bundle.pem") };
    let written = Some(paths.write(&authority).unwrap());
    let stop = tokio_util::sync::CancellationToken::new();
    let keeping = tokio::spawn(paths.clone().keep(authority.clone(), written, stop.clone()));
    *now.lock().unwrap() += HOUR * 24 * 4;
    authority.serve_as("api.openai.com").unwrap();
    let both = authority.pem();
    assert_eq!(both.matches("BEGIN CERTIFICATE").count(), 2);
    let renewed = async {
        // A file system tells nobody; each look is cheap.
        while !std::fs::read_to_string(&paths.bundle).unwrap().ends_with(&both)
            || std::fs::read_to_string(&paths.cert).unwrap() != both
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), renewed).await.unwrap();
    stop.cancel();
    keeping.await.unwrap();
    assert!(!paths.are_there());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left beside them");
}
