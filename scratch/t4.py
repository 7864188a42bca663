import sys; sys.path.insert(0,"/work/scratch")
from told import *
from itertools import permutations
def q(r,x):
    b=len(x); best=max(permutations(range(b)), key=lambda p: -sum(float((r[i]-x[p[i]]).square().mean()) for i in range(b)))
    return [(round(-10*math.log10(max(1e-10,float((r[i]-x[best[i]]).square().mean()))),1), round(float(torch.corrcoef(torch.stack([r[i].flatten(),x[best[i]].flatten()]))[0,1]),2)) for i in range(b)]
def mean(l): return sum(l)/len(l)
if __name__=="__main__":
    arch, mode, trained, count, batch, iters, data = sys.argv[1], sys.argv[2], sys.argv[3]=="trained", int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]), sys.argv[7]
    for v in eval(sys.argv[8]):
        t=time.process_time(); out=[]; ms=[]
        for c in range(count):
            net,tg,x,y=one(c,mode,trained,data,batch=batch,arch=arch)
            r,m=run2(net,tg,y,iters,shape=x.shape,truth=x,bn=0,**v); out+=q(r,x); ms.append(round(m[0],5))
        print(arch,mode,trained,data,batch,iters,v,"PSNR %.2f corr %.2f"%(mean([o[0] for o in out]),mean([o[1] for o in out])),out,ms,"cpu %.0f"%((time.process_time()-t)/count),flush=True)
