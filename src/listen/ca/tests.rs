use std::sync::Mutex;

use rustls::pki_types::{ServerName, UnixTime};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConnection};

use super::*;

const HOUR: Duration = Duration::from_hours(1);

/// An authority whose clock the test turns.
fn turned_by_hand() -> (Authority, Arc<Mutex<SystemTime>>) {
    let now = Arc::new(Mutex::new(SystemTime::now()));
    let clock = now.clone();
    let authority = Authority::with(None, Terms::default(), Arc::new(move || *clock.lock().unwrap()));
    (authority.unwrap(), now)
}

/// A client's clock.
#[derive(Debug)]
struct At(SystemTime);

impl TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.0.duration_since(SystemTime::UNIX_EPOCH).ok()?))
    }
}

/// Whether a handshake comes about, as `host` at `now`, with a client that trusts `trusted`.
fn takes(authority: &Authority, trusted: &[CertificateDer<'static>], host: &str, now: SystemTime) -> bool {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(trusted.iter().cloned());
    let client = ClientConfig::builder_with_details(authority.crypto.clone(), Arc::new(At(now)))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
    let mut server = ServerConnection::new(authority.serve_as(host).unwrap()).unwrap();
    while client.is_handshaking() || server.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets().unwrap();
        wire.clear();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut wire.as_slice()).unwrap();
        if client.process_new_packets().is_err() {
            return false;
        }
    }
    true
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
        for age in [0, 12, 24, 48] {
            let old = &read[read.len().saturating_sub(age + 1)];
            assert!(takes(&authority, old, "api.openai.com", at), "hour {hour}, read {age} hours before");
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
    let paths = files::CaPaths::beside(&dir.path().join("l.sock"));
    let written = Some(paths.write(&authority, crate::config::roots::read()).unwrap());
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

#[tokio::test]
async fn a_named_directory_that_was_taken_away_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().join("ca");
    let (authority, now) = turned_by_hand();
    let authority = Arc::new(authority);
    let paths = files::CaPaths::inside(&named).unwrap();
    let written = Some(paths.write(&authority, Vec::new()).unwrap());
    std::fs::remove_dir_all(&named).unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let keeping = tokio::spawn(paths.clone().keep(authority.clone(), written, stop.clone()));
    *now.lock().unwrap() += HOUR * 24 * 4;
    authority.serve_as("api.openai.com").unwrap(); // a turn, so that it looks now
    let made = async {
        while !paths.are_there() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), made).await.unwrap();
    let bits = std::os::unix::fs::PermissionsExt::mode(&named.metadata().unwrap().permissions());
    assert_eq!(bits & 0o7777, 0o755);
    stop.cancel();
    keeping.await.unwrap();
    assert!(paths.are_there(), "it stays");
}

/// An operator's CA in files of this directory.
fn write_pair(dir: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    std::fs::write(dir.join("ca.pem"), ca.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(dir.join("ca.key"), key.serialize_pem()).unwrap();
    std::fs::set_permissions(dir.join("ca.key"), std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[tokio::test]
async fn an_operators_ca_that_is_renewed_signs_from_then_on_and_half_a_pair_changes_nothing() {
    let (dir, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_pair(dir.path());
    write_pair(new.path());
    let copy = |name: &str| std::fs::copy(new.path().join(name), dir.path().join(name)).unwrap();
    let toml = "[ca]\ncert_file = \"ca.pem\"\nkey_file = \"ca.key\"\n";
    let name = dir.path().join("lessor.toml").display().to_string();
    let files = crate::config::load_str(toml, &name, &|_| None).unwrap().ca.unwrap();
    let authority = Arc::new(Authority::new(Some(&files)).unwrap());
    let stop = tokio_util::sync::CancellationToken::new();
    let every = Duration::from_millis(5);
    let following = tokio::spawn(operator::follow(authority.clone(), files.clone(), every, stop.clone()));
    let (first, now) = (authority.trusted().0, SystemTime::now());
    copy("ca.pem");
    assert!(files.read_again().unwrap_err().contains("is not the key of"));
    assert!(takes(&authority, &first, "api.openai.com", now), "a new certificate alone is none");
    copy("ca.key");
    let turned = async {
        while authority.trusted().0 == first {
            tokio::time::sleep(every).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), turned).await.unwrap();
    assert!(takes(&authority, &authority.trusted().0, "api.openai.com", now));
    assert!(!takes(&authority, &first, "api.openai.com", now), "the old one signs no more");
    stop.cancel();
    following.await.unwrap();
}
