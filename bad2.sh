. /tmp/str-D2/bad.sh
N=s3://lakewx\ $S/mnt/lake
u() { mountpoint -q $S/mnt/lake && { lakefs-fuse umount $S/mnt/lake >/dev/null; echo "   (was mounted)"; }; }
m() { r mount s3://lakewx $S/mnt/lake "$@"; u; }
mkdir -p $S/cwd; chmod 755 $S/cwd; cd $S/cwd
m --cache-dir ''; ls -la $S/cwd
mkdir -p $S/cwd2/proj; echo keep > $S/cwd2/proj/train.py; chmod 755 $S/cwd2/proj; 
m --cache-dir $S/cwd2/proj; ls -la $S/cwd2/proj
m --log-file /nonexistent/d/log
m --log-file $S/mnt
m --log-file ''
m --cache-dir /etc/passwd
m --cache-dir /proc/x
m --cache-dir $M/d
m --cache-dir $M/newd; ls $M
m --endpoint-url http://127.0.0.1:1 --retry-timeout 2
m --endpoint-url http://nosuch.invalid --retry-timeout 2
m --endpoint-url http://127.0.0.1:21400/path --retry-timeout 2
m --endpoint-url http://127.0.0.1:21333 --retry-timeout 2
m --endpoint-url https://127.0.0.1:21400 --retry-timeout 2
m --profile nosuch
m --region ''
m --cluster-cache http://a:1,, 
m --immutable --snapshot nope
m --immutable --snapshot ''
m --dataset ds@9
m --dataset nope@1
m --cache-size 1
m --upload-limit 0.0001
m --upload-limit 1
m --download-limit 1
m --free-space 10000GiB
m --staging-size 10000TiB
m --memory 1000TiB
m --retry-timeout 0
m --staging-timeout 0
m --delete-after 0
m --writeback-delay 100000d --explain
m --pack-threshold 1GiB
m --pack-threshold 0
m --publish 0.0001
m -s -o nonsense,foo=bar
m -o 'dev,suid'
m -o 'exec,noexec'
m -o ro --read-write
m --read-only --durability writeback
m --read-only --pack always
m --immutable --read-write
AWS_ACCESS_KEY_ID=WRONG m 
AWS_SECRET_ACCESS_KEY=WRONG m 
AWS_ACCESS_KEY_ID=AKRO AWS_SECRET_ACCESS_KEY=secretRO m 
AWS_ACCESS_KEY_ID=AKNO AWS_SECRET_ACCESS_KEY=secretNO m 
AWS_ACCESS_KEY_ID= AWS_SECRET_ACCESS_KEY= m 
